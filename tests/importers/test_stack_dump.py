"""Stacks of all ranks by several tools: the rank at another location is named with its line.

The texts follow py-spy 0.4 (src/dump.rs), Python/traceback.c (3.12) and gdb 15's "thread apply all bt".
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stallscope.diagnose.report.verdict import Report
from stallscope.importers import importer_for
from stallscope.importers.reading import read_files
from stallscope.importers.stack_dump import IMPORTER
from stallscope.store import node

from ..diagnose.reports import report_of
from .launcher_job import Log, chatter, interleaved, timeout, torchrun
from .test_hang_variants import world_dumps

Frames = list[tuple[str, str, int]]

WAITS: Frames = [
    ("all_reduce", "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 2806),
    ("wrapper", "/opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", 81),
    ("step", "/opt/job/train.py", 88),
    ("<module>", "/opt/job/train.py", 120),
]
LOADS: Frames = [("read", "/opt/job/data.py", 41), ("load", "/opt/job/data.py", 77), *WAITS[3:]]
HELPER: Frames = [
    ("wait", "/usr/lib/python3.12/threading.py", 359),
    ("run", "/usr/lib/python3.12/threading.py", 1012),
]


def pyspy(pid: int, main: Frames) -> str:
    def thread(name: str, number: int, state: str, frames: Frames) -> str:
        lines = [
            f"    {function} ({Path(file).name if '/opt/job' in file else file[26:]}:{line})"
            for function, file, line in frames
        ]
        return f'Thread {number} ({state}): "{name}"\n' + "\n".join(lines) + "\n"

    head = f"Process {pid}: python -u train.py\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
    return (
        head + thread("MainThread", pid, "active+gil", main) + thread("pin_memory", pid + 1, "idle", HELPER)
    )


def pyspy_json(pid: int, main: Frames) -> str:
    def thread(name: str, frames: Frames) -> dict[str, Any]:
        own = [
            {"name": f, "filename": file, "short_filename": Path(file).name, "line": n}
            for f, file, n in frames
        ]
        if name == "MainThread":
            own = [frame | {"short_filename": frame["filename"]} for frame in own]
        return {
            "pid": pid,
            "thread_id": 1,
            "thread_name": name,
            "active": True,
            "owns_gil": False,
            "frames": own,
        }

    return json.dumps([thread("pin_memory", HELPER), thread("MainThread", main)], indent=2)


def faulthandler(pid: int, main: Frames) -> str:
    def thread(frames: Frames) -> str:
        lines = [f'  File "{file}", line {line} in {function}' for function, file, line in frames]
        return "Thread 0x00007f0000000000 (most recent call first):\n" + "\n".join(lines) + "\n"

    return thread(HELPER) + "\n" + thread(main)


def gdb(pid: int, main: Frames) -> str:
    waits = main is WAITS
    native = [
        "pthread_cond_wait",
        "cudaStreamSynchronize" if waits else "read",
        "step" if waits else "load_batch",
    ]
    where = ["libc.so.6", "libcudart.so.12" if waits else "libc.so.6", "train.so" if waits else "data.so"]

    def frame(i: int) -> str:
        at = f"0x00007f0000000{i:03d} in " if i else ""
        return f"#{i}  {at}{native[i]} (x=1) from /lib/x86_64-linux-gnu/{where[i]}"

    threads = [
        f'Thread 2 (Thread 0x7f11 (LWP {pid + 1}) "python"):\n#0  poll () from /lib/libc.so.6\n#1  run () from x.so',
        f'Thread 1 (Thread 0x7f10 (LWP {pid}) "python"):\n' + "\n".join(frame(i) for i in range(3)),
    ]
    return f"[New LWP {pid + 1}]\n" + "\n\n".join(threads) + "\n"


TOOLS: dict[str, Callable[[int, Frames], str]] = {
    entry.__name__: entry for entry in (pyspy, pyspy_json, faulthandler, gdb)
}


def dumped(folder: Path, tool: Callable[[int, Frames], str], stacks: list[Frames], name: str) -> Path:
    folder.mkdir()
    for rank, frames in enumerate(stacks):
        file = folder / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        file.write_text(tool(5000 + 10 * rank, frames))
    return folder


def report(folder: Path) -> Report:
    assert importer_for(folder) is IMPORTER
    node.write(folder.with_suffix(".db"), IMPORTER.read(folder))
    return report_of(node.read(folder.with_suffix(".db")))


@pytest.mark.parametrize("name", ["rank{}.txt", "{}/stacks", "stack-{}.json"])
@pytest.mark.parametrize("culprit", [0, 5])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_rank_with_a_different_stack_is_named_with_its_line(
    tmp_path: Path, tool: str, culprit: int, name: str
):
    stacks = [LOADS if rank == culprit else WAITS for rank in range(8)]
    (verdict,) = report(dumped(tmp_path / "job", TOOLS[tool], stacks, name)).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [culprit])
    assert set(verdict.victims) == set(range(8)) - {culprit}
    line = "load_batch" if tool == "gdb" else "data.py:41 read"
    assert line in verdict.summary


@pytest.mark.parametrize("stacks", [[WAITS] * 8, [LOADS] * 8, [WAITS] * 4 + [LOADS] * 4, [WAITS]])
def test_inconclusive_stacks_name_no_rank(tmp_path: Path, stacks: list[Frames]):
    folder = dumped(tmp_path / "job", pyspy, stacks, "rank{}.txt")
    result = report(folder)
    assert not [verdict for verdict in result.verdicts if verdict.ranks]
    assert IMPORTER.read(folder).coverage.gaps


def test_several_processes_in_one_file(tmp_path: Path):
    file = tmp_path / "all.txt"
    file.write_text("\n".join(pyspy(5000 + rank, LOADS if rank == 2 else WAITS) for rank in range(4)))
    (verdict,) = report(file).verdicts
    assert verdict.ranks == [2]


def test_stacks_add_the_line_to_a_log(tmp_path: Path):
    log = Log()
    chatter(log)
    for rank in range(8):
        if rank != 3:
            timeout(log, rank, seq=60, enqueued=60)
    (tmp_path / "torchrun.log").write_text(interleaved(log, torchrun, 1))
    dumped(tmp_path / "stacks", pyspy, [LOADS if rank == 3 else WAITS for rank in range(8)], "rank{}.txt")
    (trace,) = read_files([tmp_path]).traces
    (verdict,) = report_of(trace).verdicts
    assert verdict.ranks == [3]
    assert "data.py:41 read" in verdict.summary
    assert "allreduce" in verdict.summary


def test_stacks_add_the_line_to_dumps(tmp_path: Path):
    import pickle

    for rank, dump in world_dumps().items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    dumped(tmp_path / "stacks", pyspy, [LOADS if rank == 2 else WAITS for rank in range(4)], "rank{}.txt")
    (trace,) = read_files([tmp_path]).traces
    (verdict,) = report_of(trace).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert "data.py:41 read" in verdict.summary
