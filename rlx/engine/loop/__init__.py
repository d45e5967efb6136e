"""The engine loop: one thread that computes all requests of a runner, step by step. `loop.py` is the entry."""
