"""Kernels of linear layers over packed weights."""
