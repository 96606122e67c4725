"""The native frames of a thread that stands still, from its registers and a copy of its stack.

    found = standing(peek, tid)            # None where the thread runs, or ran while it was looked at
    if found:
        calls = addresses(code, found)     # innermost first
        code.name(calls.places[0])

Each step to a caller is the one that the file's call frame information says (unwinding.py); where that is missing, or
the copy of the stack ends, the stack ends, and says so. Nothing is guessed.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from stallscope.capture.stacks.mapped_code import MappedCode
from stallscope.capture.stacks.peeking import Peek, memory_in, told_rows
from stallscope.capture.stacks.unwinding import BP, BX, IP, SAVED, SP, NoRules, Rules
from stallscope.events import kernel

MAX_FRAMES = 64
_REGISTERS = {IP: "ip", SP: "sp", BP: "bp", BX: "bx", 12: "r12", 13: "r13", 14: "r14", 15: "r15"}


class Standing(NamedTuple):
    """A thread that does not run. registers: in user mode, by the ABI's numbers. stack: what lies from `sp` on, with
    the return addresses that hooks have replaced.


    syscall_nr: the system call that it is in; -1: none. n_switches: how often it has left the CPU.
    """

    registers: dict[int, int]
    stack: bytes
    syscall_nr: int
    n_switches: int


class Calls(NamedTuple):
    """places: of the instruction that runs, then of the last bytes of those that called. is_cut: there are more."""

    places: tuple[int, ...]
    is_cut: bool


def standing(peek: Peek, tid: int, *, n_pieces: int = kernel.PEEK_PIECES) -> Standing | None:
    """The thread as it stands; None where it runs, ran meanwhile, has gone, or the kernel cannot tell."""
    told = peek(tid, 0, n_pieces)
    rows = told_rows(told)
    if rows is None:
        return None
    first, last = rows
    if (
        first["is_on_cpu"]
        or last["is_on_cpu"]
        or first["n_switches"] != last["n_switches"]
        or not first["ip"]
    ):
        return None
    registers = {number: int(first[name]) for number, name in _REGISTERS.items()}
    stack = bytearray(memory_in(told, registers[SP]))
    for at, address in first["hooked"].tolist():
        if 0 <= at - registers[SP] <= len(stack) - 8:
            struct.pack_into("<Q", stack, at - registers[SP], address)
    return Standing(registers, bytes(stack), int(first["syscall_nr"]), int(first["n_switches"]))


def is_still(peek: Peek, tid: int, thread: Standing) -> bool:
    """Whether the thread has not run since."""
    rows = told_rows(peek(tid, 0, 0))
    return rows is not None and not rows[1]["is_on_cpu"] and int(rows[1]["n_switches"]) == thread.n_switches


def addresses(code: MappedCode, thread: Standing, *, until: Callable[[int], bool] = lambda _: False) -> Calls:
    """The calls that a thread is in. until: where to end, at the first address for which this is true (left out)."""
    begin = thread.registers[SP]
    registers: dict[int, int] = dict(thread.registers)
    places: list[int] = []
    is_return = False
    while len(places) < MAX_FRAMES:
        place = registers[IP] - is_return  # the return address may be that of the next function
        if until(place):
            return Calls(tuple(places), False)
        places.append(place)
        try:
            rules = code.rules(place)
        except NoRules:
            return Calls(tuple(places), True)
        if rules.is_last:
            return Calls(tuple(places), False)
        above = _caller(registers, rules, thread.stack, begin)
        if above is None or above[SP] <= registers[SP]:
            return Calls(tuple(places), True)
        if not above[IP]:
            return Calls(tuple(places), False)
        if code.region(above[IP] - 1) is None:
            return Calls(tuple(places), True)
        registers, is_return = above, not rules.is_signal
    return Calls(tuple(places), True)


def _caller(registers: dict[int, int], rules: Rules, stack: bytes, begin: int) -> dict[int, int] | None:
    """The caller's registers, those that are known; None where its address is not among them. begin: of the stack."""
    if rules.base not in registers:
        return None
    frame = registers[rules.base] + rules.offset
    above = {SP: frame}
    for number in (IP, *SAVED):
        if number in rules.at:
            at = frame + rules.at[number] - begin
            if not 0 <= at <= len(stack) - 8:
                if number == IP:
                    return None
                continue
            (above[number],) = struct.unpack_from("<Q", stack, at)
        elif number in registers and number not in rules.lost and number != IP:
            above[number] = registers[number]
    return above if IP in above else None
