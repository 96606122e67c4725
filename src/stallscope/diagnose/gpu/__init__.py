"""Slow GPUs: GPU clocks, rounds on the GPUs, driver state."""
