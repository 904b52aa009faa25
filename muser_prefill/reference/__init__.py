"""The reference lane on the producer."""
