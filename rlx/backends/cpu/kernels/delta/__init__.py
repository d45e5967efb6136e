"""Kernels of the gated delta rule, which computes Mamba-2 too, and of its short convolution."""
