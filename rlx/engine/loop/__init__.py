"""The engine loop: one thread at a time computes all requests of a runner, step by step. `loop.py` is the entry."""
