"""Field offsets in CPython's structures, by version.

3.10 to 3.12 keep their layout within a minor version (a release may not change it), so the offsets are a table here,
taken from the headers of 3.10.13, 3.11.7 and 3.12.1. 3.13 and 3.14 describe their layout in _Py_DebugOffsets at the
start of _PyRuntime (Include/internal/pycore_runtime.h, pycore_debug_offsets.h). Free-threaded builds are refused.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

NONE = -1
VERSIONS = range(10, 15)
"""Minor versions of Python 3 whose frames can be read."""

COOKIE = b"xdebugpy"
DEBUG_OFFSETS_BYTES = 1024
_MAX_OFFSET = 1 << 20


class UnknownLayout(Exception):
    """An unsupported interpreter, or an interpreter whose own description is not valid."""


class Layout(NamedTuple):
    """Offsets in bytes; NONE where the version has no such field.

    cframe: in 3.11 and 3.12, the thread state points to a structure that holds the current frame.
    first_unowned: frames with this owner value or more belong to the interpreter and are not Python code. ascii_data,
    other_data: offset of the characters of a compact string. interpreter_lock: from 3.12 on, each interpreter points
    to its lock; before, the lock is a part of the runtime. lock_holder, lock_locked: offsets in the lock, or in the
    runtime.
    """

    minor: int
    interpreters_head: int
    interpreter_next: int
    threads_head: int
    thread_next: int
    thread_id: int
    native_thread_id: int
    current_frame: int
    cframe: int
    frame_previous: int
    frame_code: int
    frame_instr: int
    frame_owner: int
    frame_bytes: int
    first_unowned: int
    code_filename: int
    code_qualname: int
    code_linetable: int
    code_first_line: int
    code_instructions: int
    ascii_data: int
    other_data: int
    interpreter_lock: int = NONE
    lock_holder: int = 0
    lock_locked: int = 0

    @property
    def main_interpreter(self) -> int:
        """Offset of the pointer to the program's main interpreter. The list head is the newest interpreter; this
        pointer follows the head in all versions.
        """
        return self.interpreters_head + 8

    @property
    def has_frame_objects(self) -> bool:
        """Whether frames are separate objects, which hold the index of an instruction, not its address."""
        return self.minor < 11


_TABLE = {
    10: Layout(
        10, 32, 0, 8, 8, 176, NONE, 24, NONE, 24, 32, 96, NONE, 104, 255, 104, 112, 120, 40, NONE, 48, 72
    )._replace(lock_holder=360, lock_locked=368),
    11: Layout(
        11, 40, 0, 16, 8, 152, 160, 8, 56, 48, 32, 56, 69, 80, 255, 112, 128, 136, 72, 184, 48, 72
    )._replace(lock_holder=368, lock_locked=376),
    12: Layout(
        12, 40, 0, 72, 8, 136, 144, 0, 56, 8, 0, 56, 70, 80, 3, 112, 128, 136, 68, 192, 40, 56
    )._replace(interpreter_lock=384, lock_holder=8, lock_locked=16),
}

_SECTIONS_13 = {
    "runtime": "size finalizing interpreters_head",
    "interpreter": "size id next threads_head gc modules sysdict builtins ceval_gil gil enabled locked holder",
    "thread": "size prev next interp current_frame thread_id native_thread_id datastack_chunk status",
    "frame": "size previous executable instr_ptr localsplus owner",
    "code": "size filename name qualname linetable firstlineno argcount names kinds co_code_adaptive",
    "object": "size ob_type",
}
_SECTIONS_14 = _SECTIONS_13 | {
    "interpreter": "size id next threads_head threads_main gc modules sysdict builtins ceval_gil gil enabled "
    "locked holder code_generation tlbc_generation",
    "frame": "size previous executable instr_ptr localsplus owner stackpointer tlbc_index",
    "code": "size filename name qualname linetable firstlineno argcount names kinds co_code_adaptive co_tlbc",
}


_CHECKED_FIELDS = {"previous", "executable", "instr_ptr", "qualname", "linetable", "firstlineno", "next"}


def layout_of(minor: int, debug_offsets: bytes = b"") -> Layout:
    """The layout of Python 3.`minor`. debug_offsets: the first bytes of _PyRuntime, from 3.13 on.

    Raises UnknownLayout.
    """
    if minor in _TABLE:
        return _TABLE[minor]
    if minor not in VERSIONS:
        raise UnknownLayout(f"Python 3.{minor} is not supported: 3.{VERSIONS[0]} to 3.{VERSIONS[-1]} are")
    return _layout_from_description(minor, debug_offsets)


def _layout_from_description(minor: int, data: bytes) -> Layout:
    """The layout according to the interpreter's own description."""
    if len(data) < DEBUG_OFFSETS_BYTES or not data.startswith(COOKIE):
        raise UnknownLayout("_PyRuntime does not begin with the description of its layout")
    version, free_threaded = struct.unpack_from("<QQ", data, 8)
    if version >> 16 != 0x300 + minor:
        raise UnknownLayout(f"the layout has another version, {version:#x}")
    if free_threaded:
        raise UnknownLayout("free-threaded builds are not supported")
    offsets = _unpack_offsets(data, _SECTIONS_13 if minor == 13 else _SECTIONS_14)
    layout = Layout(
        minor=minor,
        interpreters_head=offsets["runtime.interpreters_head"],
        interpreter_next=offsets["interpreter.next"],
        threads_head=offsets["interpreter.threads_head"],
        thread_next=offsets["thread.next"],
        thread_id=offsets["thread.thread_id"],
        native_thread_id=offsets["thread.native_thread_id"],
        current_frame=offsets["thread.current_frame"],
        cframe=NONE,
        frame_previous=offsets["frame.previous"],
        frame_code=offsets["frame.executable"],
        frame_instr=offsets["frame.instr_ptr"],
        frame_owner=offsets["frame.owner"],
        frame_bytes=offsets["frame.size"],
        first_unowned=3,
        code_filename=offsets["code.filename"],
        code_qualname=offsets["code.qualname"],
        code_linetable=offsets["code.linetable"],
        code_first_line=offsets["code.firstlineno"],
        code_instructions=offsets["code.co_code_adaptive"],
        ascii_data=40,
        other_data=56,
        interpreter_lock=offsets["interpreter.ceval_gil"],
        lock_holder=offsets["interpreter.holder"] - offsets["interpreter.gil"],
        lock_locked=offsets["interpreter.locked"] - offsets["interpreter.gil"],
    )
    _check(layout, offsets)
    return layout


def _unpack_offsets(data: bytes, sections: Mapping[str, str]) -> dict[str, int]:
    names = [f"{section}.{name}" for section, text in sections.items() for name in text.split()]
    return dict(zip(names, struct.unpack_from(f"<{len(names)}Q", data, 24), strict=True))


def _check(layout: Layout, offsets: Mapping[str, int]) -> None:
    """Check that every field lies inside its structure, and that every structure has a possible size."""
    for name, offset in offsets.items():
        section, _, field = name.partition(".")
        if field not in ("enabled", "locked", "holder") and not 0 <= offset < _MAX_OFFSET:
            raise UnknownLayout(f"offset of {name} is {offset}")
        if field in _CHECKED_FIELDS and offset + 4 > offsets[f"{section}.size"]:
            raise UnknownLayout(f"{name} lies outside its structure")
    if (
        not 64 <= layout.frame_bytes <= 128
        or offsets["object.ob_type"] != 8
        or layout.code_instructions > 512
    ):
        raise UnknownLayout("unexpected structure sizes")
