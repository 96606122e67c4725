"""Flight-recorder dumps: pickle and JSON of PyTorch 2.4 to 2.11, the bare list of 2.1 and 2.2, and torchcomms."""

import json
import pickle
from pathlib import Path
from random import Random
from typing import Any

from .job import WORLD, Job
from .shapes import Format

_FRAMES = [
    {
        "filename": "/opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py",
        "line": 81,
        "name": "wrapper",
    },
    {"filename": "/opt/job/train.py", "line": 88, "name": "step"},
]
_KEPT = 12  # calls that the ring buffer still holds
_BEGAN_NS = 1_764_000_000_000_000_000


def _calls(job: Job, rank: int) -> list[tuple[str, int]]:
    """The calls of a rank in order: group and number in the group, from 1."""
    progress = job.progress(rank)
    steps = range(1, job.last_step + 2)
    return [(name, n) for n in steps for name in job.own_groups(rank) if n <= progress[name].entered]


def _entry(job: Job, rank: int, i: int, name: str, n: int, *, prefix: str = "nccl") -> dict[str, Any]:
    groups = job.own_groups(rank)
    n_members = len(job.groups[name])
    is_done = n <= job.progress(rank)[name].completed
    words = (
        job.op_of(name)
        if prefix == "nccl"
        else {"reduce_scatter": "reduce_scatter_v"}.get(job.op_of(name), job.op_of(name))
    )
    return {
        "record_id": i,
        "pg_id": list(reversed(groups)).index(name),
        "process_group": (_name(job, name), "default_pg" if name == WORLD else "undefined"),
        "collective_seq_id": n,
        "p2p_seq_id": 0,
        "op_id": i,
        "profiling_name": f"{prefix}:{words}",
        "time_created_ns": _BEGAN_NS + job.number * 10**13 + i * 10**8 + rank,
        "input_sizes": [[job.n_elements * (n_members if job.op_of(name) == "reduce_scatter" else 1)]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[job.n_elements * (n_members if job.op_of(name) == "all_gather" else 1)]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if is_done else "started",
        "time_discovered_started_ns": _BEGAN_NS,
        "time_discovered_completed_ns": _BEGAN_NS if is_done else None,
        "retired": is_done,
        "timeout_ms": 600000,
        "is_p2p": False,
        "frames": _FRAMES,
    }


def _name(job: Job, name: str) -> str:
    return "0" if name == WORLD else str(10 * job.number + list(job.groups).index(name))


def _dump(job: Job, rank: int) -> dict[str, Any]:
    groups = list(reversed(job.own_groups(rank)))
    calls = list(enumerate(_calls(job, rank)))[-_KEPT:]
    progress = job.progress(rank)
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {
            _name(job, name): {
                "name": _name(job, name),
                "desc": "default_pg" if name == WORLD else "undefined",
                "ranks": str(list(job.groups[name])),
            }
            for name in groups
        },
        "pg_status": {
            str(i): {
                "last_enqueued_collective": progress[name].entered,
                "last_started_collective": progress[name].entered,
                "last_completed_collective": progress[name].completed,
            }
            for i, name in enumerate(groups)
        },
        "entries": [_entry(job, rank, i, name, n) for i, (name, n) in calls],
    }


def _pickled(folder: Path, job: Job, chance: Random) -> None:
    form = chance.choice(("nccl_trace_rank_{}", "_dump_{}", "rank{}_fr.pkl"))
    for rank in range(job.n_ranks):
        (folder / form.format(rank)).write_bytes(pickle.dumps(_dump(job, rank), 2))


def _as_json(folder: Path, job: Job, chance: Random) -> None:
    """FlightRecorderDetail.hpp: keys in alphabetical order, counters as text, 0 for a time that is not known."""
    for rank in range(job.n_ranks):
        dump = _dump(job, rank)
        dump["pg_status"] = {k: {n: str(v) for n, v in row.items()} for k, row in dump["pg_status"].items()}
        for entry in dump["entries"]:
            entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] or 0
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump, sort_keys=True))


def _bare(folder: Path, job: Job, chance: Random) -> None:
    """torch/csrc/distributed/c10d/TraceUtils.h of 2.2: entries only, one number for all kinds of calls."""
    names = ("pg_id", "profiling_name", "input_sizes", "output_sizes", "state", "frames")
    for rank in range(job.n_ranks):
        rows = []
        for entry in _dump(job, rank)["entries"]:
            row = {name: entry[name] for name in names} | {"seq_id": entry["collective_seq_id"]}
            rows.append(row | {"time_created_us": entry["time_created_ns"] // 1000})
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(rows, 2))


def _torchcomms(folder: Path, job: Job, chance: Random) -> None:
    """hooks/fr/FlightRecorder.cpp: one counter for all communicators of a process, no counters by group."""
    is_json = chance.random() < 0.5
    for rank in range(job.n_ranks):
        calls = list(enumerate(_calls(job, rank)))
        entries = []
        for i, (name, n) in calls:
            entry = _entry(job, rank, i, name, n, prefix="ncclx")
            group = "main_comm" if name == WORLD else f"{name}_comm"
            entry |= {
                "process_group": (group, "ncclx"),
                "collective_seq_id": i,
                "thread_name": "python",
                "thread_id": "1",
            }
            if entry["retired"] and chance.random() < 0.5:  # the end is discovered by the hook only
                entry |= {"state": "scheduled", "time_discovered_completed_ns": None}
            if is_json:
                entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] or 0
                del entry["frames"]
            entries.append(entry)
        dump = {
            "version": "2.10",
            "comm_lib_version": "2.29.1",
            "pg_config": {
                name: {"name": name, "desc": "ncclx", "ranks": "[" + ",".join(map(str, members)) + "]"}
                for own in job.own_groups(rank)
                for name, members in [("main_comm" if own == WORLD else f"{own}_comm", job.groups[own])]
            },
            "pg_status": {},
            "entries": entries,
        }
        if is_json:
            (folder / f"torchcomms_fr_{rank}.json").write_text(json.dumps(dump, sort_keys=True))
        else:
            (folder / f"comm_lib_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))


FORMATS = (
    Format(
        "flight recorder, pickle",
        "pytorch/pytorch v2.11.0, FlightRecorderDetail.hpp, dump format 2.10",
        _pickled,
        is_text=False,
        can_append=False,
    ),
    Format(
        "flight recorder, JSON",
        "pytorch/pytorch v2.11.0, FlightRecorderDetail.hpp, dump_json",
        _as_json,
        can_append=False,
    ),
    Format(
        "flight recorder, bare list",
        "pytorch/pytorch v2.2.0, c10d/TraceUtils.h",
        _bare,
        is_text=False,
        can_append=False,
        has_groups=False,
    ),
    Format(
        "torchcomms flight recorder",
        "meta-pytorch/torchcomms 59426ba4, hooks/fr/FlightRecorder.cpp",
        _torchcomms,
        is_text=False,
        can_append=False,
    ),
)
