"""Profiles in the shapes in which people have them: other containers, clocks apart, kernels without arguments."""

import gzip
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.events.names import CollectiveFlag, Op
from stallscope.importers import importer_for
from stallscope.importers.profiler_trace import IMPORTER
from stallscope.importers.rank_profile import op_of_kernel

from .test_profiler_trace import KERNEL, N_RANKS, N_STEPS, profiles, written

LATE_RANK, LATE_US = 2, 30_000.0
LATE = {(LATE_RANK, step): LATE_US for step in range(6, N_STEPS, 5)} | {
    (0, step): float(random.Random(step).randrange(700)) for step in range(N_STEPS)
}
"""Rank 0 gives each step a length of its own: in a strictly periodic job every shift by a period fits."""


def kernels(file: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in file["traceEvents"] if event.get("cat") == "kernel"]


def lateness_ms(folder: Path) -> dict[int, float]:
    """By rank: how late it arrived after the first rank, at most, from the trace alone."""
    trace = IMPORTER.read(folder)
    rank_of = trace.launcher_ranks()
    rows = trace.collectives
    first = {seq: rows["ts_ns"][rows["seq"] == seq].min() for seq in np.unique(rows["seq"]).tolist()}
    late: dict[int, float] = {}
    for row in rows:
        rank = rank_of[int(row["node"]), int(row["pid"])]
        late[rank] = max(late.get(rank, 0.0), float(row["ts_ns"] - first[int(row["seq"])]) / 1e6)
    return late


def n_rounds(folder: Path) -> int:
    rows = IMPORTER.read(folder).collectives
    return len(np.unique(rows[["comm_hash", "seq"]]))


def shifted(file: dict[str, Any], by_us: float) -> None:
    for event in file["traceEvents"]:
        if "ts" in event:
            event["ts"] += by_us


@pytest.mark.parametrize("apart_s", [0.0, 0.010, 2.0, -37.0])
def test_clocks_that_are_apart_are_aligned_by_the_ends_of_kernels(tmp_path: Path, apart_s: float):
    files = profiles(LATE)
    for file in files[2:]:  # the second host
        shifted(file, apart_s * 1e6)
    folder = written(tmp_path / "job", files)
    assert n_rounds(folder) == N_STEPS
    late = lateness_ms(folder)
    assert late[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)
    assert max(late[rank] for rank in range(N_RANKS) if rank != LATE_RANK) < 2


def test_a_profile_that_begins_later_meets_the_same_rounds(tmp_path: Path):
    files = profiles(LATE)
    for file in files[2:]:
        shifted(file, 2e6)
    begin = sorted(event["ts"] for event in kernels(files[3]))[7]
    files[3]["traceEvents"] = [
        event for event in files[3]["traceEvents"] if event.get("ts", begin) >= begin - 2000
    ]
    folder = written(tmp_path / "job", files)
    assert n_rounds(folder) == N_STEPS
    assert lateness_ms(folder)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)


def without_arguments(files: list[dict[str, Any]], launch: str = "cudaLaunchKernelExC") -> None:
    for file in files:
        for event in file["traceEvents"]:
            if event.get("cat") == "kernel":
                event["args"] = {"correlation": event["args"]["correlation"], "stream": 28}
            if event.get("name") == "cudaLaunchKernelExC":
                event["name"] = launch


@pytest.mark.parametrize(
    "name",
    [
        KERNEL,
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "vllm::cross_device_reduce_2stage<float, 4>",
    ],
)
@pytest.mark.parametrize("launch", ["cudaLaunchKernelExC", "cudaGraphLaunch", "hipGraphLaunch"])
def test_kernels_without_arguments_are_matched_by_order(tmp_path: Path, name: str, launch: str):
    files = profiles(LATE)
    without_arguments(files, launch)
    for file in files:
        for event in kernels(file):
            event["name"] = name
    folder = written(tmp_path / "job", files)
    trace = IMPORTER.read(folder)
    assert not trace.coverage.gaps
    assert n_rounds(folder) == N_STEPS
    assert lateness_ms(folder)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)
    is_graph = bool(trace.collectives["flags"][0] & CollectiveFlag.GRAPH)
    assert is_graph == ("Graph" in launch)


def test_kernels_without_arguments_of_two_groups_are_kept_apart(tmp_path: Path):
    files = profiles({})
    without_arguments(files)
    random_us = random.Random(3)
    delay = [0.0, 0.0]
    for file in files:
        for event in file["traceEvents"]:
            event["rank"] = files.index(file)
    for step in range(N_STEPS):  # ranks 0, 1 and 2, 3 meet at times of their own
        delay = [delay[0] + random_us.uniform(0, 4000), delay[1] + random_us.uniform(0, 4000)]
        for rank, file in enumerate(files):
            for event in file["traceEvents"]:
                if event.get("args", {}).get("correlation") == 10 * step + 1:
                    event["ts"] += delay[rank // 2]
    trace = IMPORTER.read(written(tmp_path / "job", files))
    assert len(np.unique(trace.collectives["comm_hash"])) == 2
    assert set(trace.collectives["nranks"].tolist()) == {2}


def test_kernels_without_a_matching_group_are_counted_as_omitted(tmp_path: Path):
    files = profiles({})
    without_arguments(files)
    random_us = random.Random(1)
    for file in files:
        for event in kernels(file):
            event["ts"] += random_us.uniform(0, 20_000)
    trace = IMPORTER.read(written(tmp_path / "job", files))
    assert not len(trace.collectives)
    assert trace.coverage.omitted == {"communication kernels without a known group": N_RANKS * N_STEPS}
    assert "carry no group" in trace.coverage.gaps[0].reason


def as_list(file: dict[str, Any]) -> Any:
    return [event | {"ts": event.get("ts", 0) + 1e15} for event in file["traceEvents"]]


def wrapped(file: dict[str, Any]) -> Any:
    rest = {key: value for key, value in file.items() if key != "traceEvents"}
    return {"metadata": {"notes": "x" * 70_000} | rest, "traceEvents": file["traceEvents"]} | rest


def metadata_last(file: dict[str, Any]) -> Any:
    return {"schemaVersion": 1, "traceEvents": file["traceEvents"]} | {
        key: value for key, value in file.items() if key not in ("traceEvents", "schemaVersion")
    }


@pytest.mark.parametrize("shape", [as_list, wrapped, metadata_last])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("folders", [True, False])
def test_wrappers_and_folders_per_rank(tmp_path: Path, shape: Any, indent: int | None, folders: bool):
    for rank, file in enumerate(profiles(LATE)):
        path = tmp_path / f"rank{rank}" / "trace.json" if folders else tmp_path / f"trace_rank{rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(shape(file), indent=indent))
    assert importer_for(tmp_path) is IMPORTER
    assert n_rounds(tmp_path) == N_STEPS
    assert lateness_ms(tmp_path)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)


def test_compression_is_recognised_by_content(tmp_path: Path):
    for rank, file in enumerate(profiles(LATE)):
        text = json.dumps(file).encode()
        if rank % 2:
            (tmp_path / f"trace_{rank}.json").write_bytes(gzip.compress(text))
        else:
            with zipfile.ZipFile(tmp_path / f"trace_{rank}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("trace.json", text)
    assert lateness_ms(tmp_path)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)


@pytest.mark.parametrize("damage", [{"dur": -5}, {"dur": None}, {"ts": "soon"}, {"args": [1]}, {"ts": 1e30}])
def test_damaged_events_are_left_out_and_counted(tmp_path: Path, damage: dict[str, Any]):
    files = profiles(LATE)
    extra = {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1.0, "dur": 1.0, "pid": 1, "tid": 1}
    files[1]["traceEvents"].append(extra | damage)
    trace = IMPORTER.read(written(tmp_path / "job", files))
    assert sum(trace.coverage.omitted.values()) == 1
    assert len(trace.collectives) == N_RANKS * N_STEPS


def test_a_file_that_ends_in_the_middle_is_read_until_there(tmp_path: Path):
    files = profiles(LATE)
    folder = written(tmp_path / "job", files)
    text = json.dumps(files[0])
    next(folder.glob("host0_4000*")).write_bytes(gzip.compress(text[: len(text) // 2].encode()))
    trace = IMPORTER.read(folder)
    assert N_RANKS * N_STEPS * 3 // 4 < len(trace.collectives) < N_RANKS * N_STEPS
    assert "ends in the middle" in trace.coverage.gaps[0].reason


def test_steps_of_the_schedule_become_annotations(tmp_path: Path):
    files = profiles({})
    for file in files:
        starts = [event["ts"] - 100 for event in kernels(file)][:3]
        file["traceEvents"] += [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{7 + i}",
                "ts": ts,
                "dur": 5.0,
                "tid": 4000,
            }
            for i, ts in enumerate(starts)
        ]
    rows = IMPORTER.read(written(tmp_path / "job", files)).annotations
    assert len(rows) == 3 * N_RANKS
    assert {(row["label"], row["value"]) for row in rows} == {
        (b"step", b"7"),
        (b"step", b"8"),
        (b"step", b"9"),
    }


def test_cycles_of_one_rank_are_joined_and_attempts_are_not(tmp_path: Path):
    files = profiles(LATE)
    for rank, file in enumerate(files):
        events = file["traceEvents"]
        half = sorted(event["ts"] for event in kernels(file))[N_STEPS // 2] - 100
        for cycle, part in enumerate(
            ([e for e in events if e.get("ts", 0) < half], [e for e in events if e.get("ts", half) >= half])
        ):
            name = f"host0_{4000 + rank}.{cycle + 1}.pt.trace.json"
            own = [event | {"pid": 4000 + rank} for event in part if event.get("cat") != "kernel"]
            own += [event for event in part if event.get("cat") == "kernel"]
            (tmp_path / name).write_text(json.dumps(file | {"traceEvents": own}))
    assert n_rounds(tmp_path) == N_STEPS


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.REDUCE_SCATTER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", Op.BROADCAST),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", Op.NONE),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(...)", Op.ALL_REDUCE),
        ("multimem_all_reduce_kernel", Op.ALL_REDUCE),
        ("void at::native::reduce_kernel<512, 1>(...)", None),
        ("gemm_bf16", None),
    ],
)
def test_operations_by_the_name_of_the_kernel(name: str, op: Op | None):
    assert op_of_kernel(name) == op


def fused(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TraceFuse.merge (AMD-AGI/TraceLens, trace_fuse.py): offsets for processes and correlations, the rank in args."""
    events: list[dict[str, Any]] = []
    for rank, file in enumerate(files):
        for event in file["traceEvents"]:
            if event.get("ph") == "M":
                continue
            arguments = event.get("args", {}) | {"rank": rank}
            if "correlation" in arguments:
                arguments["correlation"] += rank * 100_000
            events.append(event | {"pid": event["pid"] + rank * 100_000, "args": arguments})
    names = [{"name": f"RANK {rank} - GPU"} for rank in range(len(files))]
    return events + [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": name} for name in names]


@pytest.mark.parametrize("n_copies", [0, 1])
def test_a_fused_trace_holds_the_rounds_of_all_ranks(tmp_path: Path, n_copies: int):
    files = profiles(LATE)
    folder = written(tmp_path / "job", files) if n_copies else tmp_path / "job"
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / "merged_trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": fused(files)}, stream, indent=4)
    assert n_rounds(folder) == N_STEPS
    assert lateness_ms(folder)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)


def test_a_trace_with_the_results_of_another_tool_is_a_copy(tmp_path: Path):
    files = profiles(LATE)
    folder = written(tmp_path / "job", files)
    counters = [{"ph": "C", "name": "Queue Length", "ts": 1.0, "pid": 1, "args": {"value": 3}}]
    overlaid = files[1] | {
        "traceEvents": files[1]["traceEvents"][: len(files[1]["traceEvents"]) // 2] + counters
    }
    (folder / "overlaid_critical_path_rank-1.json").write_text(json.dumps(overlaid))
    assert lateness_ms(folder)[LATE_RANK] == pytest.approx(LATE_US / 1e3, abs=1)
