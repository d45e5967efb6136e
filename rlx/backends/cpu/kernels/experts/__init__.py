"""Kernels of linear layers of experts."""
