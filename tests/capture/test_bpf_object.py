"""Properties of the built BPF object that hold for every kernel."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stallscope.capture.probes.program import OBJECT

_SYMBOLS, _FUNCTION, _GLOBAL = 2, 2, 1
_CALL, _TAIL_CALL = 0x85, 12
"""BPF_JMP | BPF_CALL and BPF_FUNC_tail_call of linux/bpf.h."""


class _Section(NamedTuple):
    """elf(5), the fields of an Elf64_Shdr that matter."""

    name: bytes
    kind: int
    data: bytes


def _sections(elf: bytes) -> list[_Section]:
    (begin,), (size, n, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    unpacks = [struct.unpack_from("<II8x8xQQ", elf, begin + i * size) for i in range(n)]
    texts = elf[unpacks[names][2] :]
    return [
        _Section(texts[name:].split(b"\0", 1)[0], kind, elf[at : at + length])
        for name, kind, at, length in unpacks
    ]


def _programs(elf: bytes, section: bytes) -> Iterator[bytes]:
    """The instructions of each program in a section."""
    sections = _sections(elf)
    number = next(i for i, entry in enumerate(sections) if entry.name == section)
    symbols = next(entry.data for entry in sections if entry.kind == _SYMBOLS)
    for _, info, _, where, value, size in struct.iter_unpack("<IBBHQQ", symbols):
        if where == number and info == _GLOBAL << 4 | _FUNCTION:
            yield sections[number].data[value : value + size]


@pytest.mark.parametrize("section", [b"?uprobe", b"?uretprobe"])
def test_programs_in_hooks_stay_on_the_stack_of_their_thread(bpf_object: Path, section: bytes):
    """Each program may call another; otherwise Linux 6.13 and later give it one stack per CPU, which is overwritten."""
    programs = list(_programs(OBJECT.read_bytes(), section))
    assert len(programs) >= 5
    for instructions in programs:
        calls = [(code, target) for code, target in struct.iter_unpack("<Bxxxi", instructions)]
        assert (_CALL, _TAIL_CALL) in calls
