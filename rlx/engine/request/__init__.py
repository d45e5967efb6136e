"""A generation: its request, when it stops, its result."""
