"""A node's configuration: its flags are the keys; values come from flags, environment, one TOML file and defaults."""
