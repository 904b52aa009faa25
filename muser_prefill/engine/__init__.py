"""The engine: one thread that computes, and the caches it fills."""
