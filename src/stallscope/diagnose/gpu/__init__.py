"""Slow GPUs: GPU clocks, device-side lateness, driver state."""
