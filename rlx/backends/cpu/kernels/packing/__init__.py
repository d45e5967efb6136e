"""Kernels that repack weights from the layout of a file to that of the kernels."""
