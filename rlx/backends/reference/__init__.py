"""The reference backend: programs lowered for a CPU, computed node by node with the ops' NumPy meanings."""
