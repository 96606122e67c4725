"""The native frames of a thread that does not move, from its registers and a copy of its stack.

    thread = stopped_thread(peek, tid)            # None if the thread runs, or ran during the reading
    if thread:
        calls = unwind(code, thread)              # innermost first
        code.name(calls.addresses[0])

Each step to a caller follows the call frame information of the file (eh_frame.py). Where that is missing, or where the
copy of the stack ends, the list of calls ends and is marked as cut. Nothing is guessed.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stallscope.capture.stacks.code_map import MappedCode
from stallscope.capture.stacks.eh_frame import BP, BX, IP, SAVED, SP, NoRules, Rules
from stallscope.capture.stacks.peek_abi import Peek, memory_in, thread_rows
from stallscope.events import kernel
from stallscope.events.layout import Array

MAX_FRAMES = 64
_MASK = (1 << 64) - 1
_REGISTERS = {IP: "ip", SP: "sp", BP: "bp", BX: "bx", 12: "r12", 13: "r13", 14: "r14", 15: "r15"}


class StoppedThread(NamedTuple):
    """A thread that does not run. registers: in user mode, by the ABI's numbers. stack: the bytes from `sp` on, with
    the original return addresses where probes have replaced them.
    syscall_nr: its present system call; -1: none. n_switches: how often it has left the CPU. has_returned: it has just
    returned from a call.
    """

    registers: dict[int, int]
    stack: bytes
    syscall_nr: int = -1
    n_switches: int = 0
    has_returned: bool = False


class Calls(NamedTuple):
    """addresses: of the present instruction, then of the last byte of each call instruction. is_cut: there are more.

    returns_at: location of each return address on the stack, in bytes from `sp` on.
    """

    addresses: tuple[int, ...]
    returns_at: tuple[int, ...]
    is_cut: bool


def stopped_thread(peek: Peek, tid: int, *, n_pieces: int = kernel.PEEK_PIECES) -> StoppedThread | None:
    """A thread that does not run; None if it runs, ran during the reading, has ended, or cannot be read."""
    data = peek(tid, 0, n_pieces)
    rows = thread_rows(data)
    if rows is None:
        return None
    first, last = rows
    if (
        first["is_on_cpu"]
        or last["is_on_cpu"]
        or first["n_switches"] != last["n_switches"]
        or not first["registers"]["ip"]
    ):
        return None
    registers = _registers(first)
    stack = _restore_return_addresses(first, memory_in(data, registers[SP]))
    return StoppedThread(registers, stack, int(first["syscall_nr"]), int(first["n_switches"]))


def thread_from_copy(row: Array) -> StoppedThread:
    """The thread in a copy by the kernel side: a row of kernel.NATIVE."""
    stack = _restore_return_addresses(row, row["stack"][: int(row["n_bytes"])].tobytes())
    return StoppedThread(_registers(row), stack, has_returned=bool(row["is_return"]))


def shape(native: Array, calls: Calls) -> Array:
    """The shape by which the kernel side recognises the same stack: a row of kernel.NATIVE_SHAPE for a row of
    kernel.NATIVE.
    """
    row = np.zeros(1, kernel.NATIVE_SHAPE)
    indices = [at // 8 for at in calls.returns_at[: kernel.N_RETURNS]]
    row["is_known"], row["n"], row["at"][0, : len(indices)] = 1, len(indices), indices
    words = native["stack"].view("<u8")
    check = 0
    for index in indices:
        check = _mix_in(check, int(words[index]))
    row["check"] = check
    return row


def _mix_in(check: int, word: int) -> int:
    """mix_in() of bpf/python.h."""
    check = ((check ^ word) * 0x9E3779B97F4A7C15) & _MASK
    return check ^ check >> 29


def _registers(row: Array) -> dict[int, int]:
    return {number: int(row["registers"][name]) for number, name in _REGISTERS.items()}


def _restore_return_addresses(row: Array, stack: bytes) -> bytes:
    """A copy of a stack with the original return addresses where probes have replaced them."""
    begin, restored = int(row["registers"]["sp"]), bytearray(stack)
    for at, address in row["hooked"].tolist():
        if 0 <= at - begin <= len(stack) - 8:
            struct.pack_into("<Q", restored, at - begin, address)
    return bytes(restored)


def is_still(peek: Peek, tid: int, thread: StoppedThread) -> bool:
    """Whether the thread has not run between the two readings."""
    rows = thread_rows(peek(tid, 0, 0))
    return rows is not None and not rows[1]["is_on_cpu"] and int(rows[1]["n_switches"]) == thread.n_switches


def unwind(
    code: MappedCode,
    thread: StoppedThread,
    *,
    until: Callable[[int], bool] = lambda _: False,
    max_frames: int = MAX_FRAMES,
) -> Calls:
    """The calls that a thread is in. until: ends before the first address for which this is true."""
    begin = thread.registers[SP]
    registers = dict(thread.registers)
    instructions: list[int] = []
    returns_at: list[int] = []
    is_return, is_cut = thread.has_returned, True
    while len(instructions) < max_frames:
        address = registers[IP] - is_return  # the return address may belong to the next function
        if is_return and code.region(address) is None:
            break
        if until(address):
            is_cut = False
            break
        instructions.append(address)
        try:
            rules = code.rules(address)
        except NoRules:
            break
        if rules.is_last:
            is_cut = False
            break
        caller = _caller(registers, rules, thread.stack, begin)
        if caller is None or caller[SP] <= registers[SP]:
            break
        if not caller[IP]:
            is_cut = False
            break
        returns_at.append(registers[rules.base] + rules.offset + rules.at[IP] - begin)
        registers, is_return = caller, not rules.is_signal
    return Calls(tuple(instructions), tuple(returns_at), is_cut)


def _caller(registers: dict[int, int], rules: Rules, stack: bytes, begin: int) -> dict[int, int] | None:
    """The caller's known registers; None if its address is unknown. begin: of the stack."""
    if rules.base not in registers:
        return None
    frame = registers[rules.base] + rules.offset
    caller = {SP: frame}
    for number in (IP, *SAVED):
        if number in rules.at:
            at = frame + rules.at[number] - begin
            if not 0 <= at <= len(stack) - 8:
                if number == IP:
                    return None
                continue
            (caller[number],) = struct.unpack_from("<Q", stack, at)
        elif number in registers and number not in rules.lost and number != IP:
            caller[number] = registers[number]
    return caller if IP in caller else None
