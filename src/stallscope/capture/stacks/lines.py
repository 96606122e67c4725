"""The source line of an instruction, from the table in its code object."""

_NO_LINE = -128
_LONG, _NO_COLUMNS, _NONE = 14, 13, 15
_FIRST_ONE_LINE, _LAST_ONE_LINE = 10, 12


def line_of(table: bytes, first_line: int, index: int, *, minor: int) -> int | None:
    """The line of an instruction, None where the table has none or is broken.

    index: the instruction's index in the bytecode of its code object, in units of two bytes.
    """
    try:
        return (
            _line_in_pairs(table, first_line, index)
            if minor < 11
            else _line_in_entries(table, first_line, index)
        )
    except IndexError:
        return None


def _line_in_pairs(table: bytes, line: int, index: int) -> int | None:
    end = 0
    for at in range(0, len(table) - 1, 2):
        delta = table[at + 1] - 256 if table[at + 1] > 127 else table[at + 1]
        end += table[at]
        if delta != _NO_LINE:
            line += delta
        if index * 2 < end:
            return None if delta == _NO_LINE else line
    return None


def _line_in_entries(table: bytes, line: int, index: int) -> int | None:
    at = end = 0
    while at < len(table):
        kind, n_units = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        if kind in (_LONG, _NO_COLUMNS):
            delta, at = _signed_varint(table, at)
            line += delta
        elif _FIRST_ONE_LINE <= kind <= _LAST_ONE_LINE:
            line += kind - _FIRST_ONE_LINE
        end += n_units
        if index < end:
            return None if kind == _NONE else line
        while at < len(table) and not table[at] & 0x80:  # an entry begins with the high bit set
            at += 1
    return None


def _signed_varint(table: bytes, at: int) -> tuple[int, int]:
    """A number in groups of six bits, lowest first, with its sign in the lowest bit; and the offset of its end."""
    value = shift = 0
    while True:
        byte = table[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            return (-(value >> 1) if value & 1 else value >> 1), at
