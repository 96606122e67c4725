"""Pickles of other tools that hold plain data: dicts, lists, tuples, strings, numbers, True, False, None.

Python's own unpickler runs any function that a file names, and lets a short file request much memory or tuples
nested so deeply that hashing them overflows the stack. This reader knows only the operations that plain data
needs (protocols 2 to 5), and bounds how many values a file may make.
"""

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from stallscope.errors import BadTrace

MAX_BYTES = 64 << 20
"""Larger files are refused: a dump of 20,000 calls with their stacks is some 20 MB."""

MAX_VALUES = 2_000_000
"""The most values per file, made or stored; at about 100 bytes each, less than a quarter of a gigabyte."""

_MARK = object()
_NAMES_OF_CODE = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"i": "INST",
    b"o": "OBJ",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"P": "PERSID",
    b"Q": "BINPERSID",
}


def plain(data: bytes, name: str) -> Any:
    """The value in a pickle.

    name: what messages call the file. Raises BadTrace: it asks for code, is damaged, or holds too much.
    """
    if len(data) > MAX_BYTES:
        raise BadTrace(f"{name} is too large for a dump ({len(data):,} bytes, at most {MAX_BYTES:,})")
    try:
        return _Machine(data, name).run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise BadTrace(f"{name} is a damaged pickle ({type(error).__name__}): copy it again") from error


class _Machine:
    """The stack machine of a pickle. Every step is checked where the C code trusts the file."""

    def __init__(self, data: bytes, name: str):
        self.data = data
        self.name = name
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.n_values = 0

    def run(self) -> Any:
        """The value on the stack at STOP."""
        steps, data, stop = [_STEPS.get(bytes([code])) for code in range(256)], self.data, ord(".")
        while True:
            code = data[self.at]
            self.at += 1
            if code == stop:
                return self.popped()
            step = steps[code]
            if step is None:
                self.refuse(bytes([code]))
            step(self)

    def refuse(self, code: bytes) -> NoReturn:
        if code in _NAMES_OF_CODE:
            raise BadTrace(
                f"{self.name} contains code to run ({_NAMES_OF_CODE[code]} at byte {self.at - 1}): "
                "it is not a dump, and opening it is dangerous"
            )
        raise BadTrace(
            f"{self.name} is not a pickle of plain data (operation {code!r} at byte {self.at - 1}): check the path"
        )

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        content = self.data[self.at : self.at + n]
        if len(content) != n:
            raise BadTrace(f"{self.name} ends in the middle of a value: copy it again")
        self.at += n
        return content

    def sized(self, width: int) -> bytes:
        """Bytes that follow their own length, an unsigned number of n bytes."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def count(self) -> None:
        self.n_values += 1
        if self.n_values > MAX_VALUES:
            raise BadTrace(f"{self.name} contains more than {MAX_VALUES:,} values: it is not a dump")

    def push(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def popped(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise BadTrace(f"{self.name} is a damaged pickle (a mark where a value should be): copy it again")
        return value

    def since_mark(self) -> list[Any]:
        """The values since the last mark, taken off the stack."""
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise BadTrace(f"{self.name} is a damaged pickle (no {kind.__name__} to add to): copy it again")
        return value

    def put(self, number: int) -> None:
        self.count()
        self.memo[number] = self.stack[-1]

    def add(self, pairs: list[Any]) -> None:
        """Put keys and values, in turn, into the dict on the stack."""
        target = self.top(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int, bool, bytes, float) and key is not None:
                raise BadTrace(f"{self.name} has a key that is a {type(key).__name__}: it is not a dump")
            target[key] = value


def _tuple(machine: _Machine, n: int) -> None:
    values = [machine.popped() for _ in range(n)]
    machine.push(tuple(reversed(values)))


def _append(machine: _Machine) -> None:
    value = machine.popped()
    machine.top(list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.top(list).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.popped(), machine.popped()
    machine.add([key, value])


def _dict(machine: _Machine) -> None:
    pairs = machine.since_mark()
    machine.push({})
    machine.add(pairs)


def _fixed(layout: str) -> Callable[[_Machine], None]:
    """A step that pushes one number of a fixed layout (see struct)."""
    packed = struct.Struct(layout)

    def step(machine: _Machine) -> None:
        machine.push(packed.unpack_from(machine.data, machine.at)[0])
        machine.at += packed.size

    return step


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.sized(width).decode("utf-8", "surrogatepass"))


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.sized(width))


def _long(machine: _Machine) -> None:
    machine.push(int.from_bytes(machine.sized(1), "little", signed=True))


def _number(width: int) -> Callable[[_Machine], int]:
    return lambda m: int.from_bytes(m.take(width), "little")


_Step = Callable[[_Machine], object]
_STEPS: dict[bytes, _Step] = {
    b"\x80": lambda m: m.take(1),  # PROTO
    b"\x95": lambda m: m.take(8),  # FRAME: only a hint for buffering
    b"(": lambda m: m.push(_MARK),
    b"0": lambda m: m.popped(),
    b"1": lambda m: m.since_mark(),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": _fixed("<B"),
    b"M": _fixed("<H"),
    b"J": _fixed("<i"),
    b"G": _fixed(">d"),
    b"\x8a": _long,
    b"X": _text(4),
    b"\x8c": _text(1),
    b"\x8d": _text(8),
    b"B": _bytes(4),
    b"C": _bytes(1),
    b"\x8e": _bytes(8),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"\x85": lambda m: _tuple(m, 1),
    b"\x86": lambda m: _tuple(m, 2),
    b"\x87": lambda m: _tuple(m, 3),
    b"l": lambda m: m.push(m.since_mark()),
    b"d": _dict,
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": lambda m: m.add(m.since_mark()),
    b"q": lambda m: m.put(_number(1)(m)),
    b"r": lambda m: m.put(_number(4)(m)),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.push(m.memo[_number(1)(m)]),
    b"j": lambda m: m.push(m.memo[_number(4)(m)]),
}
"""The action of each operation, by its code. Missing operations are refused."""
