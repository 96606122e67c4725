"""Is this machine ready to be traced? A file per subject; `readiness.py` is the list."""
