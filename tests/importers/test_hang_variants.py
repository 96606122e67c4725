"""Dumps, RAS answers and Inspector logs in the shapes in which people have them."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.events.call_labels import call_words
from stallscope.events.trace import Trace
from stallscope.importers import importer_for
from stallscope.importers.flight_recorder import IMPORTER as DUMPS
from stallscope.importers.ras_status import IMPORTER as RAS

from ..diagnose.reports import report_of
from . import test_inspector_log, test_ras_status


def named(trace: Trace) -> set[int]:
    return {rank for verdict in report_of(trace).verdicts if verdict.kind == "hang" for rank in verdict.ranks}


def world_dumps() -> dict[int, dict[str, Any]]:
    """Dumps of a job that uses its default group only; rank 2 makes one call less."""
    entry = {
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "frames": [
            {
                "filename": "/opt/lib/python3.11/site-packages/torch/distributed/x.py",
                "line": 9,
                "name": "inner",
            },
            {"filename": "/opt/job/train.py", "line": 88, "name": "step"},
        ],
    }
    out = {}
    for rank in range(4):
        n = 19 if rank == 2 else 20
        out[rank] = {
            "version": "2.4",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
            "pg_status": {"0": {"last_enqueued_collective": n, "last_completed_collective": 19}},
            "entries": [
                entry
                | {
                    "collective_seq_id": seq,
                    "time_created_ns": 10**18 + seq * 10**7,
                    "state": "completed" if seq < 20 else "started",
                    "retired": seq < 20,
                }
                for seq in range(1, n + 1)
            ],
        }
    return out


def bare_list(dump: dict[str, Any]) -> Any:
    """As PyTorch 2.1 and 2.2: entries only, seq_id, no names of groups, times in us in 2.1."""
    keep = ("pg_id", "profiling_name", "input_sizes", "frames", "state", "retired")
    return [
        {key: entry[key] for key in keep}
        | {"seq_id": entry["collective_seq_id"], "time_created_us": entry["time_created_ns"] // 1000}
        for entry in dump["entries"]
    ]


def as_json(dump: Any) -> bytes:
    """Counters as text, as the JSON of PyTorch writes them."""
    data = json.loads(json.dumps(dump))
    for status in data.get("pg_status", {}).values() if isinstance(data, dict) else ():
        status |= {key: str(value) for key, value in status.items()}
    return json.dumps(data, indent=1).encode()


@pytest.mark.parametrize(
    "name",
    ["nccl_trace_rank_{}", "rank{}_attempt7.pkl", "job88-r{}.bin", "rank{}/dump", "{}/trace.pkl", "tr{}"],
)
@pytest.mark.parametrize("shape", [lambda dump: dump, bare_list], ids=["dict", "list"])
@pytest.mark.parametrize(
    "form", [lambda dump: pickle.dumps(dump, 2), as_json, lambda d: gzip.compress(as_json(d))]
)
def test_a_dump_is_read_in_each_form_and_under_each_name(tmp_path: Path, name: str, shape: Any, form: Any):
    for rank, dump in world_dumps().items():
        file = tmp_path / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(form(shape(dump)))
    assert importer_for(tmp_path) is DUMPS
    trace = DUMPS.read(tmp_path)
    assert named(trace) == {2}
    assert trace.collectives["ts_ns"].min() == 10**18 + 10**7


def test_the_callers_line_and_the_group_are_kept(tmp_path: Path):
    for rank, dump in world_dumps().items():
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    trace = DUMPS.read(tmp_path)
    words = {call_words(bytes(value)) for value in trace.annotations["value"]}
    assert {(w.operation, w.group, w.line) for w in words} == {
        ("all_reduce [1024] Float", "default_pg (group 0)", "train.py:88 step")
    }
    assert "default_pg (group 0)" in trace.facts.values()


def test_dumps_of_an_earlier_attempt_are_left_out_and_counted(tmp_path: Path):
    for attempt in (1, 2):
        for rank, dump in world_dumps().items():
            if attempt == 1:
                for entry in dump["entries"]:
                    entry["time_created_ns"] -= 10**12
            (tmp_path / f"rank{rank}_attempt{attempt}.pkl").write_bytes(pickle.dumps(dump, 2))
    trace = DUMPS.read(tmp_path)
    assert named(trace) == {2}
    assert "4 more dump of an earlier attempt" in trace.source


def answers(behind: dict[int, int], *, then: dict[int, int] | None = None) -> list[dict[str, Any]]:
    counts = dict.fromkeys(range(8), 500) | behind
    later = counts if then is None else dict.fromkeys(range(8), 500) | then
    times = ("2026-06-19 06:51:10", "2026-06-19 06:51:40")
    return [test_ras_status.answer(n, at, size=8) for n, at in zip((counts, later), times, strict=True)]


def as_text(answer: dict[str, Any]) -> str:
    """The same answer in the words of client_support.cc (commit 5067397c)."""
    (comm,) = answer["communicators"]
    counts = {row["rank"]: row["collective_counts"]["AllReduce"] for row in comm["ranks"]}
    most = max(counts.values())
    behind = {rank: n for rank, n in counts.items() if n < most}
    lines = [
        "NCCL version 2.27.5 compiled with CUDA 12.8",
        "CUDA runtime version 12080, driver version 12080\n",
        "Job summary\n===========\n",
        "  Nodes  Processes         GPUs  Processes     GPUs",
        "(total)   per node  per process    (total)  (total)",
        "      1          8            1          8        8\n",
        "Communicators... (0.00s)\n=============\n",
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
        "    #  in group  per comm  per node  per comm  in group",
        "    0         1         1         8         8         8   RUNNING  MISMATCH\n",
        "Errors\n======\n",
        "Warnings\n========\n",
        "#0-0 (1badb002cafe0001) MISMATCH",
        "  Communicator ranks have different AllReduce operation counts",
        f"  {len(counts) - len(behind)} ranks have launched up to operation {most}",
    ]
    if len(behind) > 1:
        lines.append(f"  {len(behind)} ranks have launched up to operation {min(behind.values())}")
    for rank, n in behind.items():
        message = "" if len(behind) > 1 else f" has launched up to operation {n}"
        lines.append(
            f"  Rank {rank}{message} -- GPU {rank} managed by process {5000 + rank} on node 10.0.0.1"
        )
    return "\n".join(lines) + "\n\n"


JOINS = {
    "a file each": lambda texts: {f"{i}.txt": text for i, text in enumerate(texts)},
    "appended": lambda texts: {"all.txt": "".join(texts)},
    "netcat": lambda texts: {f"{i}.txt": "SERVER PROTOCOL 2\nOK\n" + text for i, text in enumerate(texts)},
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("form", [json.dumps, lambda a: json.dumps(a, indent=2) + "\n", as_text])
@pytest.mark.parametrize("behind", [{6: 499}, {2: 498, 5: 498}])
def test_ranks_behind_in_all_answers_are_named(tmp_path: Path, join: str, form: Any, behind: dict[int, int]):
    for name, text in JOINS[join]([form(answer) for answer in answers(behind)]).items():
        (tmp_path / name).write_text(text)
    assert importer_for(tmp_path) is RAS
    assert named(RAS.read(tmp_path)) == set(behind)


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (answers({}), "all counts are equal and did not change within 30 s"),
        (answers({6: 499})[:1], "only one answer"),
    ],
)
def test_answers_that_cannot_decide_leave_a_gap(tmp_path: Path, expected: list[dict[str, Any]], reason: str):
    for i, answer in enumerate(expected):
        (tmp_path / f"{i}.json").write_text(json.dumps(answer))
    trace = RAS.read(tmp_path)
    assert not named(trace)
    assert any(reason in gap.reason for gap in trace.coverage.gaps)


def test_counts_that_move_leave_no_gap(tmp_path: Path):
    moved = answers({}, then=dict.fromkeys(range(8), 650))
    for i, answer in enumerate(moved):
        (tmp_path / f"{i}.json").write_text(json.dumps(answer))
    assert not RAS.read(tmp_path).coverage.gaps


def test_counts_are_compared_per_operation(tmp_path: Path):
    """Equal sums: ranks 0 to 6 made an all-reduce where rank 7 made an all-gather."""
    output = answers({})
    for answer in output:
        for row in answer["communicators"][0]["ranks"]:
            row["collective_counts"] |= {"AllGather": 4}
            if row["rank"] == 7:
                row["collective_counts"] |= {"AllReduce": 499, "AllGather": 5}
    for i, answer in enumerate(output):
        (tmp_path / f"{i}.json").write_text(json.dumps(answer))
    verdicts = report_of(RAS.read(tmp_path)).verdicts
    assert [(v.kind, v.ranks) for v in verdicts if v.kind == "mismatch"] == [("mismatch", [7])]


def test_a_rank_that_never_joined_the_communicator_is_named(tmp_path: Path):
    output = answers({})
    for i, answer in enumerate(output):
        (comm,) = answer["communicators"]
        gone = comm["ranks"].pop(4)
        for row in comm["ranks"]:
            row["status"]["init_state"] = 7
            row["collective_counts"] = dict.fromkeys(row["collective_counts"], 0)
        comm["missing_ranks"] = [
            {key: gone[key] for key in ("rank", "host", "pid")} | {"status": {"considered_dead": False}}
        ]
        (tmp_path / f"{i}.json").write_text(json.dumps(answer))
    assert named(RAS.read(tmp_path)) == {4}


FSDP = ("AllGather", "AllGather", "ReduceScatter", "AllReduce")


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("indent", [None, 2])
def test_inspector_rounds_are_matched_by_operation_and_number(tmp_path: Path, lost: int, indent: int | None):
    """lost: records that the ring of one rank dropped at its start."""
    n_steps = 12
    for rank in range(4):
        records, counts = [], dict.fromkeys(FSDP, 0)
        for i in range(n_steps * len(FSDP)):
            op = FSDP[i % len(FSDP)]
            logged = test_inspector_log.START_US + 5000 * i
            records.append(test_inspector_log.record(rank, counts[op], 300, logged, coll=op))
            counts[op] += 1
        kept = records[lost:] if rank == 1 else records
        (tmp_path / f"{rank}.log").write_text("\n".join(json.dumps(entry, indent=indent) for entry in kept))
    rows = importer_for(tmp_path).read(tmp_path).collectives
    assert len(np.unique(rows["seq"])) == n_steps * len(FSDP)
    for seq in np.unique(rows["seq"]).tolist():
        here = rows[rows["seq"] == seq]
        assert len(set(here["op"].tolist())) == 1
        assert len(here) == (3 if seq < lost else 4)


def test_damaged_records_are_counted(tmp_path: Path):
    good = [
        json.dumps(test_inspector_log.record(0, seq, 300, test_inspector_log.START_US + 5000 * seq))
        for seq in range(9)
    ]
    file = tmp_path / "a.log"
    file.write_text("\n".join([*good[:4], good[4][:50], '{"header": 3}', *good[5:]]))
    trace = importer_for(file).read(file)
    assert len(trace.collectives) == 8
    assert trace.coverage.omitted == {"damaged records": 2}
