"""Attaching probes: libraries, BPF programs, ring buffers and the overhead budget."""

from stallscope.capture.probes import discovery, elf, operations, preflight
from stallscope.capture.probes.clock import wall_clock
from stallscope.capture.probes.discovery import Discovery, Library, functions
from stallscope.capture.probes.elf import NotElf
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Options, Program

__all__ = [
    "IOCTL_WAYS",
    "Discovery",
    "Library",
    "NotElf",
    "Options",
    "Program",
    "discovery",
    "elf",
    "functions",
    "operations",
    "preflight",
    "wall_clock",
]
