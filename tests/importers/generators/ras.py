"""Answers of NCCL's RAS service: two polls 30 s apart, as JSON or as text."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from .job import WORLD, Job
from .shapes import Format

_FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")  # ncclFuncStr
NAMES = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
}


def counts(job: Job, rank: int, group: str) -> dict[str, int]:
    """Calls by operation, as collOpCounts counts them."""
    return dict.fromkeys(_FUNCTIONS, 0) | {NAMES[job.op_of(group)]: job.progress(rank)[group].entered}


def answer(job: Job, second: int, *, moved: int = 0) -> dict[str, Any]:
    """jsonWriteHeader, jsonStartCommunicator and jsonWriteRankData. moved: calls since the first answer."""
    comms = []
    for name, members in job.groups.items():
        rows = []
        for index, rank in enumerate(members):
            own = counts(job, rank, name)
            own[NAMES[job.op_of(name)]] += moved
            status = {
                "init_state": 0,
                "async_error": 0,
                "finalize_called": False,
                "destroy_flag": False,
                "abort_flag": False,
            }
            device = rank % max(job.n_ranks // 2, 1)
            row = {
                "rank": index,
                "host": job.host(rank),
                "pid": job.pid(rank),
                "cuda_dev": device,
                "nvml_dev": device,
            }
            rows.append(row | {"status": status, "collective_counts": own})
        comms.append(
            {
                "hash": f"0x{job.comm_id(name):x}",
                "secondary_hash": "0x1:0x2",
                "size": len(members),
                "ranks_count": len(rows),
            }
            | {"missing_ranks_count": 0, "ranks": rows}
        )
    at = f"2026-11-29 {10 + job.number:02d}:{second // 60:02d}:{second % 60:02d}"
    head = {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": at,
    }
    return head | {"communicators_count": len(comms), "communicators": comms}


def text(job: Job, *, moved: int = 0) -> str:
    """rasClientRunComms: only the counts that differ are listed, with the ranks of groups of at most a quarter."""
    lines = [
        "NCCL version 2.27.5 compiled with CUDA 12.8",
        "CUDA runtime version 12080, driver version 12080\n",
        "Job summary\n===========\n",
        "  Nodes  Processes         GPUs  Processes     GPUs",
        "(total)   per node  per process    (total)  (total)",
        f"{2:7d}  {job.n_ranks // 2:9d}  {1:11d}  {job.n_ranks:9d}  {job.n_ranks:7d}\n",
        "Communicators... (0.00s)\n=============\n",
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
        "    #  in group  per comm  per node  per comm  in group",
    ]
    comms = list(job.groups.items())
    for number, (name, members) in enumerate(comms):
        error = "MISMATCH" if _differs(job, name) else "OK"
        n = f"{len(members):8d}"
        lines.append(f"{number:5d}  {1:8d}  {1:8d}  {n}  {n}  {n}  {'RUNNING':>8s}  {error:>6s}")
    lines.append("\nErrors\n======\n\nWarnings\n========\n")
    for number, (name, members) in enumerate(comms):
        if _differs(job, name):
            lines += _mismatch(job, number, name, members, moved)
    return "\n".join(lines) + "\n"


def _differs(job: Job, name: str) -> bool:
    return len({job.progress(rank)[name].entered for rank in job.groups[name]}) > 1


def _mismatch(job: Job, number: int, name: str, members: tuple[int, ...], moved: int) -> list[str]:
    entered = {index: job.progress(rank)[name].entered + moved for index, rank in enumerate(members)}
    lines = [
        f"#{number}-0 ({job.comm_id(name):016x}) MISMATCH",
        f"  Communicator ranks have different {NAMES[job.op_of(name)]} operation counts",
    ]
    for value, n in sorted(Counter(entered.values()).items(), key=lambda item: -item[1]):
        if n > 1:
            lines.append(f"  {n} ranks have launched up to operation {value}")
        if (n <= 10 and n <= 0.25 * len(members)) or n == 1:
            for index in (p for p, own in entered.items() if own == value):
                rank = members[index]
                device = rank % max(job.n_ranks // 2, 1)
                process = f"GPU {device} managed by process {job.pid(rank)} on node {job.host(rank)}"
                has = "" if n > 1 else f" has launched up to operation {value}"
                lines.append(f"  Rank {index}{has} -- {process}")
    return [*lines, ""]


def _json(folder: Path, job: Job, chance: Random) -> None:
    moved = 0 if job.culprits else 50
    answers = [json.dumps(answer(job, 0), indent=2), json.dumps(answer(job, 30, moved=moved), indent=2)]
    if chance.random() < 0.5:
        (folder / "ras.json").write_text("\n".join(answers) + "\n")
    else:
        for i, words in enumerate(answers):
            (folder / f"ras{i}.json").write_text(words)


def _text(folder: Path, job: Job, chance: Random) -> None:
    moved = 0 if job.culprits else 50
    words = chance.choice(("", "OK\n", "SERVER PROTOCOL 2\nOK\n"))
    (folder / "ras.txt").write_text("".join(words + text(job, moved=n) for n in (0, moved)))


FORMATS = (
    Format("RAS answers, JSON", "NVIDIA/nccl 5067397c, src/ras/client_support.cc", _json),
    Format(
        "RAS answers, text", "NVIDIA/nccl 5067397c, src/ras/client_support.cc", _text, names_group_ranks=False
    ),
)
__all__ = ["FORMATS", "NAMES", "WORLD", "answer", "text"]
