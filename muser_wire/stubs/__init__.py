"""Generated from proto/ by `make proto`; read by `muser_wire.messages` alone."""
