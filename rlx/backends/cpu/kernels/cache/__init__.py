"""Kernels that write KV caches."""
