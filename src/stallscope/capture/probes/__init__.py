"""Attaching probes: libraries, BPF programs, ring buffers and the overhead budget."""
