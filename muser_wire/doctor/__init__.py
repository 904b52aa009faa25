"""What `muser doctor` looks at: each check returns findings, and none of them changes anything."""
