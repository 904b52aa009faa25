"""How models write a conversation down: rendering of history, and reading of answers."""
