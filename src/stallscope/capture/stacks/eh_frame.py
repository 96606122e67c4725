"""Rules to unwind from an instruction to its caller: the call frame information (.eh_frame) of an ELF file, x86-64.

Every library that a C++ exception may pass has it, and compilers also write it for C; so it works for code without
frame pointers. The table in .eh_frame_hdr is the index. Rare forms (expressions, other encodings) are refused, and the
stack ends there. Sources: DWARF 5, section 6.4; Linux Standard Base 5, "Exception Frames"; register numbers are from
the System V ABI for x86-64.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import Image

BX, BP, SP, IP = 3, 6, 7, 16
SAVED = (BX, BP, 12, 13, 14, 15)
"""Callee-saved registers."""

_PT_GNU_EH_FRAME = 0x6474E550
_HEADER = bytes([1, 0x1B, 0x03, 0x3B])
"""Version 1; address of .eh_frame (relative, 4 bytes); number of rows (4 bytes); rows (relative to the header)."""
_MAX_ROWS = 1 << 24
_MAX_ENTRY_BYTES = 1 << 16
_MAX_NESTED = 16
_POINTER_BYTES = {0x0: 8, 0x2: 2, 0x3: 4, 0x4: 8, 0xA: 2, 0xB: 4, 0xC: 8}

_UNCHANGED, _LOST, _UNSUPPORTED = None, (), (0, 0)
"""States of a register without an offset: unchanged; lost; given by a rule that is not supported here."""


class NoRules(Exception):
    """The file has no rules for that address, or rules of an unsupported form."""


@dataclass(frozen=True)
class Rules:
    """Locations of the caller's registers, for one instruction.

    base, offset: the frame's address is that register plus this offset. at: by register, its saved location as an
    offset from the frame's address; registers in `lost` cannot be restored; all others are unchanged. is_last: the
    function has no caller. is_signal: a signal has interrupted the caller, so the caller's address is not a return
    address.
    """

    base: int
    offset: int
    at: Mapping[int, int]
    lost: frozenset[int] = frozenset()
    is_last: bool = False
    is_signal: bool = False


@dataclass
class _Cie:
    """The facts that several functions share: a common information entry (CIE)."""

    code_unit: int = 1
    data_unit: int = 1
    encoding: int = 0
    has_data: bool = False
    is_signal: bool = False
    program: bytes = b""


@dataclass
class _State:
    base: int = SP
    offset: int = 0
    registers: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    def copy(self) -> "_State":
        return _State(self.base, self.offset, dict(self.registers))


def rules_at(image: Image, address: int) -> Rules:
    """The rules for the instruction at an address (as the file counts them). Raises NoRules."""
    if image.machine != 62:
        raise NoRules("not x86-64")
    try:
        return _rules(image, address)
    except (ValueError, struct.error, LookupError, OverflowError) as broken:
        raise NoRules(f"broken call frame information: {broken}") from None


def _rules(image: Image, address: int) -> Rules:
    begin, cie, program = _function(image, _find_fde(image, address), address)
    state, initial = _State(), _State()
    _run(cie.program, state, initial, cie, until=0)
    initial = state.copy()
    _run(program, state, initial, cie, until=address - begin)
    saved = {number: rule for number, rule in state.registers.items() if rule is not _UNCHANGED}
    return Rules(
        base=state.base,
        offset=state.offset,
        at={number: rule[0] for number, rule in saved.items() if len(rule) == 1},
        lost=frozenset(number for number, rule in saved.items() if len(rule) != 1),
        is_last=saved.get(IP) == _LOST,
        is_signal=cie.is_signal,
    )


def _find_fde(image: Image, address: int) -> int:
    """The address of the entry (FDE) whose function begins last before an address."""
    header = next((segment for segment in image.segments if segment.kind == _PT_GNU_EH_FRAME), None)
    if header is None:
        raise NoRules("no table of call frame information")
    data = elf.contents(image, header.address, 12)
    (n,) = struct.unpack_from("<I", data, 8)
    if data[:4] != _HEADER or n > _MAX_ROWS:
        raise NoRules("an unsupported table of call frame information")
    low, high = 0, n  # the row is in [low - 1, high)
    while low < high:
        middle = (low + high) // 2
        (begin,) = struct.unpack("<i", elf.contents(image, header.address + 12 + 8 * middle, 4))
        low, high = (middle + 1, high) if header.address + begin <= address else (low, middle)
    if not low:
        raise NoRules("no entry for this address")
    (entry,) = struct.unpack("<i", elf.contents(image, header.address + 12 + 8 * (low - 1) + 4, 4))
    return header.address + int(entry)


def _entry_content(image: Image, address: int) -> tuple[bytes, int]:
    """The content of an entry of .eh_frame after its length, and its address."""
    (n_bytes,) = struct.unpack("<I", elf.contents(image, address, 4))
    if not 4 < n_bytes <= _MAX_ENTRY_BYTES:
        raise NoRules(f"an entry of {n_bytes} bytes")
    return elf.contents(image, address + 4, n_bytes), address + 4


def _function(image: Image, entry: int, address: int) -> tuple[int, _Cie, bytes]:
    """Start of the function, its CIE, and its own program."""
    data, at = _entry_content(image, entry)
    (back,) = struct.unpack_from("<I", data)
    cie = _parse_cie(_entry_content(image, at - back)[0])
    size = _POINTER_BYTES.get(cie.encoding & 15, 0)
    if not size or cie.encoding & 0xF0 not in (0, 0x10):
        raise NoRules("an unsupported encoding of addresses")
    begin = int.from_bytes(data[4 : 4 + size], "little", signed=True)
    if cie.encoding & 0xF0:
        begin += at + 4
    length = int.from_bytes(data[4 + size : 4 + 2 * size], "little")
    if not begin <= address < begin + length:
        raise NoRules("no entry for this address")
    program_at = 4 + 2 * size
    if cie.has_data:
        n, program_at = _uleb128(data, program_at)
        program_at += n
    return begin, cie, data[program_at:]


def _parse_cie(data: bytes) -> _Cie:
    identity, version = struct.unpack_from("<IB", data)
    end = data.index(0, 5)
    augmentation, at = data[5:end].decode("latin-1"), end + 1
    if identity or version not in (1, 3) or (augmentation and not augmentation.startswith("z")):
        raise NoRules("an unsupported common entry")
    cie = _Cie()
    cie.code_unit, at = _uleb128(data, at)
    cie.data_unit, at = _sleb128(data, at)
    return_register, at = (data[at], at + 1) if version == 1 else _uleb128(data, at)
    if return_register != IP:
        raise NoRules("an unsupported column for the return address")
    if augmentation:
        cie.has_data = True
        n, at = _uleb128(data, at)
        _parse_augmentation(augmentation[1:], data[at : at + n], cie)
        at += n
    cie.program = data[at:]
    return cie


def _parse_augmentation(augmentation: str, data: bytes, cie: _Cie) -> None:
    at = 0
    for letter in augmentation:
        if letter == "R":
            cie.encoding, at = data[at], at + 1
        elif letter == "S":
            cie.is_signal = True
        elif letter == "L":
            at += 1
        elif letter == "P":
            at += 1 + _POINTER_BYTES[data[at] & 15]
        else:
            raise NoRules(f"unsupported augmentation {letter!r}")


def _run(program: bytes, state: _State, initial: _State, cie: _Cie, *, until: int) -> None:
    """Run a function's program up to the instruction `until` bytes into it. initial: the state for "restore"."""
    at = location = 0
    remembered: list[_State] = []
    while at < len(program):
        code, low = program[at] & 0xC0, program[at] & 0x3F
        at += 1
        if code == 0x40 or (not code and low in (0x02, 0x03, 0x04)):
            size = 0 if code else 1 << (low - 2)
            location += (low if code else int.from_bytes(program[at : at + size], "little")) * cie.code_unit
            at += size
            if location > until:
                return
        elif code == 0x80:
            n, at = _uleb128(program, at)
            state.registers[low] = (n * cie.data_unit,)
        elif code == 0xC0:
            state.registers[low] = initial.registers.get(low)
        elif low == 0x0A:
            if len(remembered) >= _MAX_NESTED:
                raise NoRules("too many nested states")
            remembered.append(state.copy())
        elif low == 0x0B:
            restored = remembered.pop()
            state.base, state.offset, state.registers = restored.base, restored.offset, restored.registers
        elif 0x0C <= low <= 0x0F or low in (0x12, 0x13):
            at = _frame_rule(low, program, at, state, cie)
        else:
            at = _register_rule(low, program, at, state=state, initial=initial, cie=cie)


def _frame_rule(low: int, program: bytes, at: int, state: _State, cie: _Cie) -> int:
    """An instruction about the frame's address, starting at its operands. Returns the start of the next instruction."""
    if low in (0x0C, 0x0D, 0x12):
        state.base, at = _uleb128(program, at)
    if low in (0x0C, 0x0E):
        state.offset, at = _uleb128(program, at)
    elif low in (0x12, 0x13):
        n, at = _sleb128(program, at)
        state.offset = n * cie.data_unit
    elif low == 0x0F:
        n, at = _uleb128(program, at)
        at += n
        state.base = -1  # by an expression: refused where it is used
    return at


def _register_rule(low: int, program: bytes, at: int, *, state: _State, initial: _State, cie: _Cie) -> int:
    """An instruction about a register, or without effect. Returns the start of the next instruction. Raises NoRules."""
    if low == 0x00:
        return at
    number, at = _uleb128(program, at)
    if low in (0x05, 0x14):
        n, at = _uleb128(program, at)
        state.registers[number] = (n * cie.data_unit,) if low == 0x05 else _UNSUPPORTED
    elif low in (0x11, 0x15):
        n, at = _sleb128(program, at)
        state.registers[number] = (n * cie.data_unit,) if low == 0x11 else _UNSUPPORTED
    elif low == 0x06:
        state.registers[number] = initial.registers.get(number)
    elif low in (0x07, 0x08):
        state.registers[number] = _LOST if low == 0x07 else _UNCHANGED
    elif low == 0x09:
        _, at = _uleb128(program, at)
        state.registers[number] = _UNSUPPORTED
    elif low in (0x10, 0x16):
        n, at = _uleb128(program, at)
        at += n
        state.registers[number] = _UNSUPPORTED
    elif low != 0x2E:  # DW_CFA_GNU_args_size: its number has no effect here
        raise NoRules(f"unsupported instruction {low:#x}")
    return at


def _uleb128(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 number, and the offset of its end."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
    raise NoRules("a number of more than 64 bits")


def _sleb128(data: bytes, at: int) -> tuple[int, int]:
    """A signed LEB128 number, and the offset of its end."""
    value, end = _uleb128(data, at)
    n_bits = 7 * (end - at)
    return (value - (1 << n_bits) if value >> (n_bits - 1) & 1 else value), end
