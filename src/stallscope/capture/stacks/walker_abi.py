"""The interpreter data passed to the kernel side, and the stacks it returns: struct python and struct stack.

The kernel side walks the frames of the thread that it interrupts, so the frames are exact. The names are read here,
some milliseconds later, and only if the code objects are still the same.
"""

import numpy as np

from stallscope.capture.stacks.codes import Codes, Identity
from stallscope.capture.stacks.frames import Frame, InvalidFrames
from stallscope.capture.stacks.interpreter import Interpreter
from stallscope.capture.stacks.layouts import NONE, Layout
from stallscope.events import kernel
from stallscope.events.layout import Array

_COPIED_FIELDS = (
    "threads_head",
    "thread_next",
    "thread_id",
    "current_frame",
    "frame_previous",
    "frame_code",
    "frame_instr",
    "frame_bytes",
    "first_unowned",
    "code_filename",
    "code_qualname",
    "code_linetable",
    "code_first_line",
)


def python_row(python: Interpreter) -> Array:
    """One row of kernel.PYTHON."""
    layout, row = python.layout, np.zeros(1, kernel.PYTHON)
    for name in _COPIED_FIELDS:
        row[name] = getattr(layout, name)
    row["interpreters"] = python.runtime + layout.main_interpreter
    row["code_type"] = python.code_type
    row["has_cframe"], row["cframe"] = layout.cframe != NONE, max(layout.cframe, 0)
    row["has_owner"], row["frame_owner"] = layout.frame_owner != NONE, max(layout.frame_owner, 0)
    row["is_index"] = layout.has_frame_objects
    return row


def words(row: Array, codes: Codes, layout: Layout) -> tuple[str, ...]:
    """The frames of a row of kernel.STACK in words, innermost first. Raises InvalidFrames, Unreadable."""
    return tuple(
        str(codes.name_frame(_frame(frame, layout), identity=_identity(frame)))
        for frame in row["frames"][: int(row["n"])]
    )


def _frame(row: Array, layout: Layout) -> Frame:
    code, instruction = int(row["code"]), int(row["instruction"])
    if layout.has_frame_objects:
        return Frame(code, int(np.int32(np.uint32(instruction & 0xFFFFFFFF))))
    unit = (instruction - code - layout.code_instructions) >> 1
    if unit < -1:
        raise InvalidFrames(f"instruction outside the code object at {code:#x}")
    return Frame(code, max(unit, 0))


def _identity(row: Array) -> Identity:
    return Identity(int(row["filename"]), int(row["qualname"]), int(row["linetable"]), int(row["first_line"]))
