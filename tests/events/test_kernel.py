"""The numbers and records of bpf/events.h match names.py and kernel.py."""

import re
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from stallscope.events import kernel, layout
from stallscope.events.names import (
    Category,
    CollectiveFlag,
    Direction,
    HostKind,
    HostMemory,
    MemoryKind,
    OffCpuFlag,
    Op,
)
from stallscope.events.syscalls import blocked_category


def enumeration(source: str, name: str) -> dict[str, int]:
    """The members of a C enum, numbered as C does."""
    body = re.search(rf"enum {name} \{{(.*?)\}};", source, re.DOTALL).group(1)
    members: dict[str, int] = {}
    following = 0
    for member in re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(","):
        if match := re.match(r"\s*(\w+)(?:\s*=\s*(\d+))?\s*$", member):
            following = int(match[2]) if match[2] else following
            members[match[1]] = following
            following += 1
    return members


@pytest.fixture(scope="module")
def header(repository: Path) -> str:
    return (repository / "bpf/events.h").read_text()


@pytest.mark.parametrize(
    ("name", "prefix", "ours"),
    [
        ("category", "", Category),
        ("op", "OP_", Op),
        ("event_kind", "EVENT_", kernel.Kind),
        ("counter", "", kernel.Counter),
        ("action", "ACTION_", kernel.Action),
        ("collective_flag", "COLLECTIVE_", CollectiveFlag),
        ("off_cpu_flag", "OFF_", OffCpuFlag),
        ("host_kind", "HOST_", HostKind),
        ("direction", "", Direction),
        ("host_memory", "HOST_", HostMemory),
        ("memory_kind", "MEMORY_", MemoryKind),
        ("shape", "SHAPE_", kernel.Shape),
        ("hook_group", "GROUP_", kernel.HookGroup),
    ],
)
def test_enumerations_have_the_same_numbers(header: str, name: str, prefix: str, ours: type[IntEnum]):
    other_rows = {key.removeprefix(prefix): value for key, value in enumeration(header, name).items()}
    other_rows.pop("N_COUNTERS", None)
    assert other_rows
    assert other_rows.items() <= {member.name: member.value for member in ours}.items()
    if name in ("category", "event_kind", "counter", "action", "host_kind"):
        assert len(other_rows) == len(ours)


@pytest.mark.parametrize(("dtype", "n_bytes"), [(kernel.ARRIVAL, 248)] + [(kernel.STRUCTS[s], 120) for s in (
    "event", "call_event", "off_event", "life_event", "raw_event", "host_event"
)])  # fmt: skip
def test_records_divide_the_ring_with_its_header(dtype, n_bytes: int):
    assert dtype.itemsize == n_bytes
    assert (4 << 20) % (n_bytes + 8) == 0


def test_arrivals_have_the_fields_of_the_table():
    from_elsewhere = {"node", "comm_handle", "count_bytes", "gpu_start_ns", "gpu_end_ns"}
    assert {field.name for field in layout.COLLECTIVES.fields} - from_elsewhere <= set(kernel.ARRIVAL.names)


def test_blocked_in_is_the_same_table_in_c(repository: Path):
    numbers_of = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not numbers_of.exists():
        pytest.skip("other: no x86-64 kernel headers")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", numbers_of.read_text()))
    source = (repository / "bpf/sched.bpf.c").read_text()
    other_rows = {
        int(numbers[name]): Category[word]
        for name, word in re.findall(r"\[__NR_(\w+)\] = ([A-Z_]+),", source)
    }
    own_rows = blocked_category(np.arange(512), is_interruptible=np.zeros(512, bool))
    assert other_rows == {nr: Category(int(c)) for nr, c in enumerate(own_rows) if c != Category.OTHER_OFF}
