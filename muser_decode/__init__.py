"""The consumer: verifies and installs KV planes, generates with MLX, serves an OpenAI-compatible endpoint."""
