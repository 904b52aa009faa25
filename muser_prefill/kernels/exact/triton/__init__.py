"""The reference lane's operations as Triton kernels: what an NVIDIA GPU uses. Nothing here is imported without Triton.

Integer dot products on int8 tensor cores, exact in int32; float32 steps each rounded by itself: `ROUNDED_STEPS` keeps
the compiler from contracting them. `muser_prefill.kernels.exact.reference` is the plain text of the same operations.
"""
