"""Checks whether this machine is ready for tracing. One file per subject; `readiness.py` is the list."""
