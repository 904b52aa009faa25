"""The reference lane as compiled kernels for a CPU: C++ sources, what compiles them, and the calls."""
