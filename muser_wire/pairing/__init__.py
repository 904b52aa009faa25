"""How two machines come to trust each other: certificates, the interactive exchange, what is kept of it."""
