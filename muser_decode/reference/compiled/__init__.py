"""The reference lane on a decode node's CPU, by the compiled kernels."""
