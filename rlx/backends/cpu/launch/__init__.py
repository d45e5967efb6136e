"""How a compiled program runs: the native worker loop, its threads, and a program with its memory."""
