"""The operations of the decoder. Each hand-written one has a plain reference and is admitted against it at start."""
