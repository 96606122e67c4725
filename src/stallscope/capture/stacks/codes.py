"""The names in a process's code objects: file, function and line of a frame.

Names are read once and cached by the code object's address. A program may free a code object and create another at the
same address, so the identity (the addresses of its strings and tables, its first line) is read again each time.
"""

import struct
from collections import OrderedDict
from typing import NamedTuple

from stallscope.capture.stacks.frames import Frame, InvalidFrames
from stallscope.capture.stacks.interpreter import Interpreter
from stallscope.capture.stacks.lines import line_of
from stallscope.capture.stacks.memory import Memory

_MAX_CHARACTERS = 1024
_MAX_TABLE_BYTES = 1 << 18
_MAX_KEPT = 4096
_BYTES_DATA = 32
"""Offset of the content of a bytes object."""


class NamedFrame(NamedTuple):
    """A frame in words. line: None where the code has no line."""

    file: str
    function: str
    line: int | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line if self.line is not None else '?'} {self.function}"


class Identity(NamedTuple):
    """Distinguishes a code object from another at the same address."""

    filename: int
    qualname: int
    linetable: int
    first_line: int


class _Code(NamedTuple):
    identity: Identity
    file: str
    function: str
    table: bytes


class Codes:
    """The code objects of one process that have been read."""

    def __init__(self, memory: Memory, python: Interpreter):
        self._memory, self._python = memory, python
        self._cache: OrderedDict[int, _Code] = OrderedDict()

    def name_frame(self, frame: Frame, *, identity: Identity | None = None) -> NamedFrame:
        """File, function and line of a frame. identity: the expected identity of the code object.

        Raises InvalidFrames if the code object has been replaced or is not valid; Unreadable.
        """
        current = self._identity(frame.code)
        if identity is not None and current != identity:
            raise InvalidFrames(f"the code object at {frame.code:#x} has been replaced")
        code = self._cache.get(frame.code)
        if code is None or code.identity != current:
            code = _Code(
                current,
                self._text(current.filename),
                self._text(current.qualname),
                self._bytes(current.linetable),
            )
            self._cache[frame.code] = code
            if len(self._cache) > _MAX_KEPT:
                self._cache.popitem(last=False)
        line = line_of(code.table, current.first_line, frame.unit, minor=self._python.layout.minor)
        return NamedFrame(code.file, code.function, line)

    def _identity(self, code: int) -> Identity:
        layout = self._python.layout
        data = self._memory.read(
            code, max(layout.code_linetable, layout.code_qualname, layout.code_filename) + 8
        )
        if struct.unpack_from("<Q", data, 8)[0] != self._python.code_type:
            raise InvalidFrames(f"no code object at {code:#x}")
        return Identity(
            *(struct.unpack_from("<Q", data, at)[0] for at in (layout.code_filename, layout.code_qualname)),
            *struct.unpack_from("<Q", data, layout.code_linetable),
            *struct.unpack_from("<i", data, layout.code_first_line),
        )

    def _text(self, at: int) -> str:
        """A compact string (Include/cpython/unicodeobject.h)."""
        layout = self._python.layout
        head = self._memory.read(at, 40)
        (length,), (state,) = struct.unpack_from("<q", head, 16), struct.unpack_from("<I", head, 32)
        width, is_compact, is_ascii = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if not is_compact or width not in (1, 2, 4) or length < 0:
            raise InvalidFrames(f"no string at {at:#x}")
        if not length:
            return ""
        data = self._memory.read(
            at + (layout.ascii_data if is_ascii else layout.other_data), min(length, _MAX_CHARACTERS) * width
        )
        text = data.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width], errors="replace")
        return "".join(character if character.isprintable() else "\ufffd" for character in text)

    def _bytes(self, at: int) -> bytes:
        n_bytes = self._memory.word(at + 16)
        if n_bytes > _MAX_TABLE_BYTES:
            raise InvalidFrames(f"no line table at {at:#x}")
        return self._memory.read(at + _BYTES_DATA, n_bytes) if n_bytes else b""
