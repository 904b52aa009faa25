"""The HTTP side: reads requests strictly, speaks OpenAI's shapes, streams answers."""
