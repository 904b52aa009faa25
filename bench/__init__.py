"""Measurements against peers. Not part of the product: peers live in an environment of their own."""
