"""The producer: prefills prompts with torch and streams their KV planes."""
