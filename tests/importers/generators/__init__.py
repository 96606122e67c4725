"""Generators of other tools' files with a known truth: one module per family of formats, each with FORMATS."""

from . import dumps, logs, profiles, ras, stacks, timers
from .marking import Mark, Tally, mark, tally
from .shapes import SHAPES, Format

FORMATS: tuple[Format, ...] = (
    *logs.FORMATS,
    *stacks.FORMATS,
    *dumps.FORMATS,
    *ras.FORMATS,
    *profiles.FORMATS,
    *timers.FORMATS,
)

__all__ = ["FORMATS", "SHAPES", "Format", "Mark", "Tally", "mark", "tally"]
