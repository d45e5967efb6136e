"""Kernels that work row by row."""
