"""The reference lane: rules under which every array library gives the same bytes. docs/numerics.md states them."""
