"""The CPU backend without machine code, RLX_JIT=0: loop kernels run as Python functions, for a debugger."""
