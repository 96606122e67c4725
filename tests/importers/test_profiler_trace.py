"""torch.profiler traces: rounds, times on the GPU and where the host's time went, out of what Kineto writes."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadTrace
from stallscope.events.names import Category, Datatype, Op
from stallscope.importers import importer_for
from stallscope.importers.gloo_collectives import GlooCollectives
from stallscope.importers.profiler_file import profiles_of
from stallscope.importers.profiler_trace import IMPORTER
from stallscope.importers.rank_profile import WORK
from stallscope.store import node

from ..diagnose.reports import only, report_of

BASE_NS = 1_790_000_000_000_000_000
N_RANKS, N_STEPS = 4, 40
KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def event(kind: str, name: str, ts_us: float, dur_us: float, **rest: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts_us, "dur": dur_us, "pid": 4000, "tid": 4000} | rest


def profiles(late: dict[tuple[int, int], float], reason: str = LOADER) -> list[dict[str, Any]]:
    """A data-parallel job: each step loads a batch, works 5 ms, reduces 1 MiB and waits. late: us by (rank, step)."""
    events: list[list[dict[str, Any]]] = [[] for _ in range(N_RANKS)]
    now = np.zeros(N_RANKS)
    for step in range(N_STEPS):
        arrival = np.zeros(N_RANKS)
        for rank in range(N_RANKS):
            loading = 200 + late.get((rank, step), 0.0)
            if reason:
                events[rank].append(event("user_annotation", reason, now[rank], loading))
            now[rank] += loading
            work = 5000 + 37 * ((7 * rank + 3 * step) % 5)
            events[rank].append(event("cpu_op", "aten::mm", now[rank], work))
            now[rank] += work
            arrival[rank] = now[rank]
        end = arrival.max() + 300
        for rank in range(N_RANKS):
            link = {"correlation": 10 * step + 1}
            output = {
                "Collective name": "allreduce",
                "In msg nelems": 262144,
                "Out msg nelems": 262144,
                "Group size": N_RANKS,
                "dtype": "Float",
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1, 2, 3]",
            }
            own_rows = events[rank]
            own_rows.append(event("cuda_runtime", "cudaLaunchKernelExC", arrival[rank], 8, args=link))
            begin = arrival[rank] + 20
            own_rows.append(event("kernel", KERNEL, begin, end - begin, pid=0, tid=28, args=link | output))
            own_rows.append(
                event(
                    "cuda_runtime", "cudaStreamSynchronize", arrival[rank] + 30, end + 5 - arrival[rank] - 30
                )
            )
            now[rank] = end + 5
    return [
        {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": N_RANKS},
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}, *events[rank]],
            "traceName": "x.json",
        }
        for rank in range(N_RANKS)
    ]


def written(folder: Path, files: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for rank, content in enumerate(files):
        text = json.dumps(content).encode()
        (folder / f"host{rank // 2}_{4000 + rank}.1790.pt.trace.json.gz").write_bytes(gzip.compress(text, 1))
    return folder


def test_calls_kernels_and_groups_become_rounds(tmp_path):
    folder = written(tmp_path / "job", profiles({}))
    importer = importer_for(folder)
    assert importer is IMPORTER
    trace = importer.read(folder)
    assert trace.nodes == ("host0", "host1")
    rows = trace.collectives
    assert len(rows) == N_RANKS * N_STEPS
    assert set(rows["op"]) == {Op.ALL_REDUCE}
    assert (set(rows["datatype"]), set(rows["count_bytes"])) == ({Datatype.FLOAT32}, {1 << 20})
    assert sorted(set(rows["comm_rank"])) == [0, 1, 2, 3]
    assert (rows["gpu_start_ns"] > rows["ts_ns"]).all()
    assert rows["ts_ns"].min() >= BASE_NS
    # 5 ms of work in each step, all of it in a recorded operation
    first = rows[rows["comm_rank"] == 0]
    spent = np.diff(first["ledger_ns"], axis=0)
    assert spent[:, Category.ON_CPU - 1].min() >= 4_900_000
    assert (spent.sum(axis=1) == np.diff(first["ts_ns"])).all()
    assert report_of(trace).healthy


@pytest.mark.parametrize(
    ("reason", "cause"),
    [(LOADER, "input_starvation"), ("", "not_recorded")],
    ids=["loader", "nothing recorded"],
)
def test_the_late_rank_is_named(tmp_path, reason, cause):
    late = {(2, step): 30_000.0 for step in range(6, N_STEPS, 5)}
    trace = importer_for(written(tmp_path / "job", profiles(late, reason))).read(tmp_path / "job")
    node.write(tmp_path / "trace.db", trace)
    verdict = only(report_of(node.read(tmp_path / "trace.db")))
    assert (verdict.kind, verdict.ranks, verdict.period_steps) == ("straggler", [2], 5)
    assert verdict.causes[0].cause.name == cause
    assert verdict.late_ms is not None
    assert verdict.late_ms["median"] == pytest.approx(30, rel=0.05)


def test_two_files_of_one_rank_are_refused(tmp_path):
    files = profiles({})
    files[1]["distributedInfo"]["rank"] = 0
    folder = written(tmp_path / "job", files)
    with pytest.raises(BadTrace, match="one file per rank"):
        importer_for(folder).read(folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"ts": "soon"},
        {"dur": -1},
        {"ts": 1e30},
        {"ts": float("nan")},
        {"args": [1]},
        {"pid": {"a": 1}},
    ],
)
def test_nonsense_is_an_error_or_is_left_out(tmp_path, damage):
    files = profiles({})
    files[0]["traceEvents"][3] |= {"cat": "cuda_runtime"} | damage
    folder = written(tmp_path / "job", files)
    try:
        importer_for(folder).read(folder)
    except BadTrace as error:
        assert "\n" not in str(error)


def test_a_damaged_operator_does_not_remove_the_others(tmp_path):
    operators = [event("cpu_op", "aten::mm", 1000.5 * i, 100.25) for i in range(10)]
    damaged = [operators[0] | {"dur": -1}, operators[0] | {"ts": "soon"}, operators[0] | {"ts": 1e30}]
    files = profiles({})[:1]
    files[0]["traceEvents"] = [*operators, damaged[0], *damaged]
    file = tmp_path / "one.json"
    file.write_text(json.dumps(files[0]))
    (profile,) = profiles_of(file)
    begins_ns = BASE_NS + 1_000_500 * np.arange(10)
    assert profile.work["begin_ns"].tolist() == begins_ns.tolist()
    assert (profile.work["end_ns"] - profile.work["begin_ns"]).tolist() == [100_250] * 10
    assert set(profile.work["tid"]) == {4000}
    assert profile.omitted == {
        "events with a negative duration": 2,
        "events without a time or duration": 1,
        "events with a time out of range": 1,
    }
    files[0]["traceEvents"] = operators
    file.write_text(json.dumps(files[0]))
    assert (profiles_of(file)[0].work == profile.work).all()


@settings(max_examples=50)
@given(cut=st.floats(0.1, 1), junk=st.binary(max_size=20))
def test_damaged_files_are_refused_in_one_line(tmp_path, cut, junk):
    text = json.dumps(profiles({})[0]).encode()
    at = int(len(text) * cut)
    file = tmp_path / "damaged.json"
    file.write_bytes(text[:at] + junk)
    try:
        importer_for(file).read(file)
    except BadTrace as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("has_own_thread", [False, True])
def test_a_rank_that_is_late_for_collectives_of_gloo_is_named(tmp_path, has_own_thread):
    """They have no kernels: an operator lasts from the call to the completion."""
    folder = written(tmp_path / "profiles", gloo_profiles(late_us=20_000, has_own_thread=has_own_thread))
    report = report_of(IMPORTER.read(folder))
    verdict = only(report)
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([2], "host_compute")
    assert verdict.victims == [0, 1, 3]


GLOO_SPANS = [(1_040, 9_000), (11_040, 19_000), (21_040, 29_000)]
CALLS_WITH_GLOO = [(1_000, 1_030), (11_000, 11_030), (21_000, 21_030)]
CALLS_OF_NCCL = [(9_100, 9_130), (19_100, 19_130), (29_100, 29_130)]


@pytest.mark.parametrize(
    ("calls", "spans", "begins_ns"),
    [
        (CALLS_WITH_GLOO, GLOO_SPANS, [1_000, 11_000, 21_000]),
        (CALLS_WITH_GLOO[1:], GLOO_SPANS, [1_040, 11_000, 21_000]),
        (CALLS_WITH_GLOO, GLOO_SPANS[:2], [1_000, 11_000]),
        ([*CALLS_WITH_GLOO, *CALLS_OF_NCCL], GLOO_SPANS, [1_040, 11_040, 21_040]),
        ([*CALLS_WITH_GLOO[1:], *CALLS_OF_NCCL], GLOO_SPANS, [1_040, 11_040, 21_040]),
        ([], GLOO_SPANS, [1_040, 11_040, 21_040]),
    ],
    ids=[
        "of gloo",
        "first call cut off",
        "last one cut off",
        "of NCCL too",
        "of NCCL, first cut off",
        "none",
    ],
)
def test_collectives_of_gloo_begin_at_their_own_calls(calls, spans, begins_ns):
    """Calls of NCCL have the same name."""
    gloo = GlooCollectives()
    for begin_ns, end_ns in calls:
        gloo.take("c10d::allreduce_", begin_ns, end_ns, 4000)
    for begin_ns, end_ns in spans:
        gloo.take("gloo:all_reduce", begin_ns, end_ns, 4001)
    collectives = gloo.collectives(np.empty(0, WORK))
    assert [each.begin_ns for each in collectives] == begins_ns
    ends_ns = [end_ns for _, end_ns in spans]
    assert [each.end_ns for each in collectives] == ends_ns
    assert [each.begin_ns + each.wait_ns for each in collectives] == ends_ns


def test_messages_of_gloo_are_counted_as_not_read(tmp_path):
    files = gloo_profiles(late_us=0)
    files[0]["traceEvents"].append(event("cpu_op", "gloo:send", 0, 10))
    trace = IMPORTER.read(written(tmp_path / "profiles", files))
    assert trace.coverage.omitted == {"messages and barriers of gloo": 1}


def gloo_profiles(*, late_us: float, has_own_thread: bool = False) -> list[dict[str, Any]]:
    """Each step computes 5 ms and reduces by gloo; rank 2 is late in every third step."""
    events: list[list[dict[str, Any]]] = [[] for _ in range(N_RANKS)]
    begin_us = 0.0
    for step in range(N_STEPS):
        work_us = [5000 + 37 * ((7 * rank + 3 * step) % 5) for rank in range(N_RANKS)]
        work_us[2] += late_us if step % 3 == 0 else 0
        end_us = begin_us + max(work_us) + 300
        for own_rows, own_us in zip(events, work_us, strict=True):
            own_rows.append(event("cpu_op", "aten::mm", begin_us, own_us))
            arrival_us = begin_us + own_us
            if has_own_thread:
                own_rows.append(event("cpu_op", "c10d::allreduce_", arrival_us, 30))
                own_rows.append(
                    event("user_annotation", "gloo:all_reduce", arrival_us + 40, end_us - arrival_us - 40)
                    | {"tid": 4001 + step % 2}
                )
            else:
                own_rows.append(event("cpu_op", "gloo:all_reduce", arrival_us, end_us - arrival_us))
        begin_us = end_us
    return [
        content | {"traceEvents": own_rows} for content, own_rows in zip(profiles({}), events, strict=True)
    ]
