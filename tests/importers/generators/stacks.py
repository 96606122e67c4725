"""Stacks of all ranks: py-spy (text, JSON), faulthandler, gdb and the kernels of cuda-gdb."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from .job import WORLD, Job
from .shapes import Format

_TORCH = "/opt/venv/lib/python3.12/site-packages/torch/distributed"
Frames = list[tuple[str, str, int]]
_HELPER: Frames = [
    ("wait", "/usr/lib/python3.12/threading.py", 359),
    ("run", "/usr/lib/python3.12/threading.py", 1012),
]
_LINES = {"all_reduce": 2806, "all_gather": 3300, "reduce_scatter": 4066, "broadcast": 2710}


def _main(job: Job, rank: int) -> Frames:
    """The main thread: in the collective that the rank waits in, or in the program's own code."""
    group = job.waits_in(rank)
    base: Frames = [("<module>", "/opt/job/train.py", 120)]
    if group is None:
        return [("read_shard", "/opt/job/data.py", 41), ("load", "/opt/job/data.py", 77), *base]
    op = job.op_of(group)
    caller = ("step", "/opt/job/train.py", 88) if group == WORLD else ("forward", "/opt/job/model.py", 210)
    return [
        (op, f"{_TORCH}/distributed_c10d.py", _LINES[op]),
        ("wrapper", f"{_TORCH}/c10d_logger.py", 81),
        caller,
        *base,
    ]


def _pyspy(job: Job, rank: int) -> str:
    pid = job.pid(rank)

    def thread(name: str, number: int, frames: Frames) -> str:
        rows = [
            f"    {function} ({file.removeprefix('/opt/venv/lib/python3.12/site-packages/')}:{line})"
            for function, file, line in frames
        ]
        return f'Thread {number} (idle): "{name}"\n' + "\n".join(rows) + "\n"

    head = f"Process {pid}: python -u train.py\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
    return head + thread("MainThread", pid, _main(job, rank)) + thread("pin_memory", pid + 1, _HELPER)


def _pyspy_json(job: Job, rank: int) -> str:
    def thread(name: str, frames: Frames) -> dict[str, object]:
        rows = [
            {
                "name": f,
                "filename": file,
                "short_filename": file.removeprefix("/opt/venv/lib/python3.12/site-packages/").removeprefix(
                    "/opt/job/"
                ),
                "line": n,
                "module": None,
            }
            for f, file, n in frames
        ]
        return {
            "pid": job.pid(rank),
            "thread_id": 1,
            "thread_name": name,
            "os_thread_id": 1,
            "active": True,
            "owns_gil": False,
            "frames": rows,
        }

    return json.dumps([thread("pin_memory", _HELPER), thread("MainThread", _main(job, rank))], indent=2)


def _faulthandler(job: Job, rank: int) -> str:
    def thread(frames: Frames) -> str:
        rows = [f'  File "{file}", line {line} in {function}' for function, file, line in frames]
        return "Thread 0x00007f0000000000 (most recent call first):\n" + "\n".join(rows) + "\n"

    return thread(_HELPER) + "\n" + thread(_main(job, rank))


def _gdb(job: Job, rank: int) -> str:
    pid, group = job.pid(rank), job.waits_in(rank)
    names = (
        ["pthread_cond_wait", "cudaStreamSynchronize", "c10d::Work::wait", "step", "main"]
        if group
        else ["read", "load_batch", "step", "main"]
    )
    libraries = (
        ["libc.so.6", "libcudart.so.12", "libtorch_cuda.so", "train.so", "python3.12"]
        if group
        else ["libc.so.6", "data.so", "train.so", "python3.12"]
    )
    rows = [
        f"#{i}  {f'0x00007f0000000{i:03d} in ' if i else ''}{name} (x=1) from /lib/{library}"
        for i, (name, library) in enumerate(zip(names, libraries, strict=True))
    ]
    other = f'Thread 2 (Thread 0x7f11 (LWP {pid + 1}) "python"):\n#0  poll () from /lib/libc.so.6\n#1  run () from x.so'
    main = f'Thread 1 (Thread 0x7f10 (LWP {pid}) "python"):\n' + "\n".join(rows)
    return f"[New LWP {pid + 1}]\n{other}\n\n{main}\n"


def _cuda_gdb(job: Job, rank: int) -> str:
    """info cuda kernels: a rank that waits runs a kernel of NCCL, the culprit runs its own kernel or none."""
    group = job.waits_in(rank)
    head = f"[New LWP {job.pid(rank) + 1}]\n(cuda-gdb) info cuda kernels\n"
    columns = "  Kernel Parent Dev Grid Status                 SMs Mask  GridDim  BlockDim Invocation\n"
    kind = {"all_reduce": "AllReduce_Sum_bf16_RING_LL", "all_gather": "AllGather_RING_LL"}
    if group is None:
        return head + (
            columns
            + "*      0      -   0  812 Active 0x0000000f (32,1,1) (256,1,1) attention_kernel(q=0x7f,k=0x7f)\n"
            if rank % 2
            else "No CUDA kernels.\n"
        )
    name = f"ncclDevKernel_{kind.get(job.op_of(group), 'ReduceScatter_Sum_bf16_RING_LL')}"
    return (
        head
        + columns
        + f"*      0      -   0  {800 + rank} Active 0x0000ffff (16,1,1) (544,1,1) {name}(args4K=...)\n"
    )


def _files(tool: Callable[[Job, int], str], name: str) -> Callable[[Path, Job, Random], None]:
    def write(folder: Path, job: Job, chance: Random) -> None:
        for rank in range(job.n_ranks):
            (folder / name.format(rank)).write_text(tool(job, rank))

    return write


FORMATS = (
    Format("py-spy dump, text", "benfred/py-spy v0.4.1, src/dump.rs", _files(_pyspy, "rank{}.txt")),
    Format(
        "py-spy dump, JSON",
        "benfred/py-spy v0.4.1, src/dump.rs (--json)",
        _files(_pyspy_json, "rank{}.json"),
        can_append=False,
    ),
    Format(
        "faulthandler", "python/cpython v3.12.3, Python/traceback.c", _files(_faulthandler, "stacks_{}.txt")
    ),
    Format(
        "gdb, thread apply all bt",
        "GDB manual 15, Backtraces and Threads",
        _files(_gdb, "bt.{}.txt"),
        has_groups=False,
    ),
    Format(
        "cuda-gdb, info cuda kernels",
        "CUDA-GDB documentation 12.8, CUDA Information Commands",
        _files(_cuda_gdb, "cuda_{}.txt"),
        has_groups=False,
    ),
)
