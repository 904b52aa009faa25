"""The engine: one thread that owns MLX, and what it keeps, fills and samples."""
