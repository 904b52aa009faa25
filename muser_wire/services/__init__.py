"""The nodes as services of the system: a systemd unit for the producer, a launchd agent for the decode node."""
