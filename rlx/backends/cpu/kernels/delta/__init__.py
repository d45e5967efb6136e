"""Kernels of the gated delta rule and of its short convolution."""
