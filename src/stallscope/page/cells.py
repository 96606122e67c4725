"""Cells of the heat map: one byte each on a logarithmic scale, and the binary frame that carries them.

A code c below NO_DATA stands for 0.1 ms x 2^(c/16), so neighbouring codes differ by 4.4 %. Code 0 is 0.1 ms or less,
code 254 is 6.0 s or more. The exact values come from the round endpoint.
"""

import json
from collections.abc import Mapping

import numpy as np

from stallscope.events.layout import Array

NO_DATA = 255
_FLOOR_NS = 100_000.0
_STEPS_PER_OCTAVE = 16


def codes(ns: Array) -> Array:
    """The codes of durations in ns, uint8 in the same shape; NaN becomes NO_DATA."""
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.rint(_STEPS_PER_OCTAVE * np.log2(np.maximum(ns, _FLOOR_NS) / _FLOOR_NS))
    return np.where(np.isnan(ns), NO_DATA, np.minimum(steps, NO_DATA - 1)).astype(np.uint8)


def framed(head: Mapping[str, object], *arrays: Array) -> bytes:
    """The length of the JSON head as u32, the head padded to 4 bytes, then the arrays one after the other."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(array.tobytes() for array in arrays)
