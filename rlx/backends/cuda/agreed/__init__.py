"""What kernels and the host agree on: names, and places in memory that both use.

A start from the compile cache needs this, and nothing of the code that writes kernels.
"""
