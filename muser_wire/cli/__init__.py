"""The `muser` command: what belongs to both nodes."""
