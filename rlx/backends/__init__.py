"""Backends: what turns a scheduled program into something that runs. Between the passes and the runtime."""
