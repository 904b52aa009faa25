"""The reference lane in MLX: the bytes of `muser_wire.reference`, by fewer and larger operations."""
