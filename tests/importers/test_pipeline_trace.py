"""Operation traces of pipeline jobs: a slow worker, a heavy stage and moving work are distinguished."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.diagnose.report.verdict import Report
from stallscope.errors import BadTrace
from stallscope.events.names import CollectiveFlag, Op
from stallscope.importers import importer_for
from stallscope.importers.pipeline_trace import IMPORTER
from stallscope.store import node

from ..diagnose.reports import report_of
from .pipeline_job import BACKWARD_S, FORWARD_S, Job, rows, table, write


def explained(path: Path, tmp_path: Path) -> Report:
    """The report on a trace file, through the importer that sniffs it and through a stored trace."""
    importer = importer_for(path)
    assert importer is IMPORTER
    node.write(tmp_path / "trace.db", importer.read(path))
    return report_of(node.read(tmp_path / "trace.db"))


def told_losses(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "public" / "pipeline-traces" / f"result-{name}.json").read_text())


@pytest.mark.shared
def test_the_one_slow_worker_of_a_real_job_is_named(shared: Path, tmp_path: Path):
    file = shared / "public" / "pipeline-traces" / "trace-AR.parquet"
    (verdict,) = explained(file, tmp_path).verdicts
    result = pq.read_table(file, columns=["rank", "stage", "dp_rank"])
    is_slow = (result["stage"].to_numpy() == 0) & (result["dp_rank"].to_numpy() == 0)
    assert verdict.kind == "straggler"
    assert verdict.ranks == np.unique(result["rank"].to_numpy()[is_slow]).tolist()
    assert verdict.evidence.n_late_steps == verdict.evidence.n_steps == 44
    assert [part.cause.name for part in verdict.causes] == ["unknown"]


@pytest.mark.shared
def test_the_heavy_last_stage_of_a_real_job_is_an_imbalance(shared: Path, tmp_path: Path):
    file = shared / "public" / "pipeline-traces" / "trace-ST.parquet"
    (verdict,) = explained(file, tmp_path).verdicts
    result = pq.read_table(file, columns=["rank", "stage"])
    last = result["stage"].to_numpy() == 3
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.slow_stage == np.unique(result["rank"].to_numpy()[last]).tolist()
    assert verdict.evidence.n_late_steps == 32


@pytest.mark.shared
@pytest.mark.parametrize("name", ["AR", "ST"])
def test_the_slowdown_of_a_real_job_is_that_of_the_simulated_ideal_within_5_percent(
    shared: Path, tmp_path: Path, name: str
):
    output = told_losses(shared, name)
    (verdict,) = explained(shared / "public" / "pipeline-traces" / f"trace-{name}.parquet", tmp_path).verdicts
    assert verdict.evidence.slowdown == pytest.approx(output["blocking_slowdown"], rel=0.05)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "n_gpus"), [("AR", 64), ("ST", 8)])
def test_the_cost_of_a_real_job_is_a_lower_bound(shared: Path, tmp_path: Path, name: str, n_gpus: int):
    output = told_losses(shared, name)
    lost_s = sum(output["step_t_base"][step] - output["step_t_noblk"][step] for step in output["step_t_base"])
    (verdict,) = explained(shared / "public" / "pipeline-traces" / f"trace-{name}.parquet", tmp_path).verdicts
    assert verdict.cost is not None and verdict.cost.is_lower_bound
    # The file covers only one in four GPUs of the first job.
    assert 0.2 * lost_s * n_gpus < verdict.cost.gpu_seconds <= lost_s * (n_gpus - 1)


@settings(max_examples=15)
@given(data=st.data())
def test_a_slow_worker_is_named_wherever_it_sits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    n_stages, n_replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    stage, replica = data.draw(st.integers(0, n_stages - 1)), data.draw(st.integers(0, n_replicas - 1))
    slow = data.draw(st.floats(1.25, 3.0))
    numbers = data.draw(st.permutations(range(n_stages * n_replicas)))
    job = Job(
        n_stages=n_stages,
        n_replicas=n_replicas,
        factor=lambda step, s, d: slow if (s, d) == (stage, replica) else 1.0,
        seed=data.draw(st.integers(0, 1000)),
        rank_of=lambda s, d: numbers[s * n_replicas + d],
    )
    path = tmp_path_factory.mktemp("job") / "trace.parquet"
    report = report_of(IMPORTER.read(write(path, job)))
    if n_stages > 1 and n_replicas == 1:
        return
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [job.rank(stage, replica)])
    longest = verdict.causes[0].evidence.work
    assert isinstance(longest, list) and len(longest) == 2  # forwards and backwards


def test_the_slowdown_is_relative_to_the_job_without_the_fault(tmp_path: Path):
    slow = Job(factor=lambda step, s, d: 2.0 if (s, d) == (1, 2) else 1.0)
    (verdict,) = explained(write(tmp_path / "slow.parquet", slow), tmp_path).verdicts
    real = _length_s(rows(slow)) / _length_s(rows(Job()))
    assert verdict.evidence.slowdown == pytest.approx(real, rel=0.03)
    lost_s = _length_s(rows(slow)) - _length_s(rows(Job()))
    assert verdict.cost is not None
    assert verdict.cost.gpu_seconds == pytest.approx(lost_s * 15, rel=0.05)


def _length_s(expected_rows: list[dict[str, Any]]) -> float:
    ends: dict[int, float] = {}
    for row in expected_rows:
        ends[row["step"]] = max(ends.get(row["step"], 0.0), row["start_ts"] + row["duration"])
    return sum(ends.values())


def test_a_worker_that_is_slow_now_and_then_is_named_for_those_steps(tmp_path: Path):
    job = Job(n_steps=40, factor=lambda step, s, d: 2.0 if (s, d) == (2, 1) and step % 5 == 3 else 1.0)
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [job.rank(2, 1)])
    assert verdict.evidence.n_late_steps == 8


def test_two_slow_workers_are_two_verdicts(tmp_path: Path):
    job = Job(factor=lambda step, s, d: {(0, 1): 1.8, (3, 2): 1.6}.get((s, d), 1.0))
    report = explained(write(tmp_path / "trace.parquet", job), tmp_path)
    assert [v.ranks for v in report.verdicts] == [[job.rank(0, 1)], [job.rank(3, 2)]]


@pytest.mark.parametrize("workers", [[(3, 0), (3, 1)], [(0, 2), (3, 1)]])
def test_the_joint_cost_of_two_slow_workers_is_split_between_them(
    tmp_path: Path, workers: list[tuple[int, int]]
):
    slow = Job(factor=lambda step, s, d: 1.5 if (s, d) in workers else 1.0)
    costs = [v.cost for v in explained(write(tmp_path / "trace.parquet", slow), tmp_path).verdicts]
    lost_s = _length_s(rows(slow)) - _length_s(rows(Job()))
    gpu_seconds = [cost.gpu_seconds for cost in costs if cost]
    assert sum(gpu_seconds) == pytest.approx(lost_s * 15, rel=0.06)
    assert gpu_seconds[0] == pytest.approx(gpu_seconds[1], rel=0.05)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_heavy_stage_is_an_imbalance_without_a_culprit(tmp_path: Path, stage: int):
    job = Job(factor=lambda step, s, d: 1.6 if s == stage else 1.0)
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.slow_stage == [job.rank(stage, d) for d in range(4)]


def test_a_heavy_stage_with_a_single_worker_is_inconclusive(tmp_path: Path):
    job = Job(n_replicas=1, factor=lambda step, s, d: 1.6 if s == 2 else 1.0)
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert verdict.abstained_because


def test_a_replica_that_is_slow_in_all_stages_is_inconclusive(tmp_path: Path):
    job = Job(factor=lambda step, s, d: 1.5 if d == 1 else 1.0)
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert verdict.evidence.suspects == [job.rank(s, 1) for s in range(4)]


def test_work_that_is_uneven_in_turns_names_no_rank(tmp_path: Path):
    turns = np.random.default_rng(7).uniform(1.0, 2.2, (60, 4))
    job = Job(n_steps=60, factor=lambda step, s, d: float(turns[step, d]))
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.moves


def test_pauses_of_changing_workers_name_no_rank(tmp_path: Path):
    random = np.random.default_rng(3)
    hit = {
        int(step): tuple(random.integers(0, 4, 2).tolist()) for step in random.choice(60, 20, replace=False)
    }
    job = Job(n_steps=60, factor=lambda step, s, d: 1.8 if hit.get(step) == (s, d) else 1.0)
    (verdict,) = explained(write(tmp_path / "trace.parquet", job), tmp_path).verdicts
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.n_late_steps == 20


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), n_stages=st.integers(1, 4), n_replicas=st.integers(1, 4))
def test_a_healthy_job_is_healthy(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n_stages: int, n_replicas: int
):
    job = Job(n_stages=n_stages, n_replicas=n_replicas, scatter=0.05, seed=seed)
    assert report_of(IMPORTER.read(write(tmp_path_factory.mktemp("job") / "t.parquet", job))).healthy


def test_missing_records_accuse_no_rank(tmp_path: Path):
    result = [
        row
        for i, row in enumerate(rows(Job()))
        if not (row["rank"] == 3 and "compute" in row["optype"] and i % 3 == 0)
    ]
    pq.write_table(table(result), tmp_path / "trace.parquet")
    assert explained(tmp_path / "trace.parquet", tmp_path).healthy


def test_the_trace_has_the_contents_of_the_file(tmp_path: Path):
    job = Job(n_stages=3, n_replicas=2, n_steps=2, n_batches=2, scatter=0.0)
    trace = IMPORTER.read(write(tmp_path / "trace.parquet", job))
    result = rows(job)
    assert len(trace.spans) == len(result)
    compute = trace.spans[trace.spans["op"] == Op.COMPUTE]
    assert set(compute["label"].tolist()) == {b"forward-compute", b"backward-compute", b"optimizer"}
    lengths = set(compute["duration_ns"][compute["label"] == b"forward-compute"].tolist())
    assert all(abs(ns - FORWARD_S * 1e9) < 1000 for ns in lengths) and BACKWARD_S > FORWARD_S
    assert set(trace.spans["step"].tolist()) == {50, 51}
    first = trace.spans[trace.spans["step"] == 50]
    assert (
        trace.spans[trace.spans["step"] == 51]["ts_ns"].min() >= (first["ts_ns"] + first["duration_ns"]).max()
    )
    assert (trace.collectives["flags"] == CollectiveFlag.NO_LEDGER).all()
    assert trace.processes["rank"].tolist() == list(range(6))
    assert not trace.clocks


def test_every_round_has_all_its_members_once(tmp_path: Path):
    job = Job(n_stages=3, n_replicas=2, n_steps=3)
    trace = IMPORTER.read(write(tmp_path / "trace.parquet", job))
    reduced = trace.collectives[trace.collectives["op"] == Op.REDUCE_SCATTER]
    _, counts = np.unique(reduced[["comm_hash", "seq"]], return_counts=True)
    assert (counts == 2).all() and len(counts) == 3 * 3
    sent, received = (trace.collectives[trace.collectives["op"] == op] for op in (Op.SEND, Op.RECV))
    pairs = {(int(r["comm_hash"]), int(r["comm_rank"]), int(r["peer_rank"]), int(r["seq"])) for r in sent}
    assert pairs == {
        (int(r["comm_hash"]), int(r["peer_rank"]), int(r["comm_rank"]), int(r["seq"])) for r in received
    }
    assert len(pairs) == len(sent) == 2 * 2 * 3 * 6


def test_a_folder_with_two_traces_is_refused(tmp_path: Path):
    (tmp_path / "result.json").write_text("{}")
    write(tmp_path / "a.parquet", Job(n_steps=4))
    assert importer_for(tmp_path) is IMPORTER
    assert len(IMPORTER.read(tmp_path).processes) == 16
    write(tmp_path / "b.parquet", Job(n_steps=4))
    with pytest.raises(BadTrace, match="got 2 pipeline traces"):
        IMPORTER.read(tmp_path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("duration", lambda n: pa.array([float("nan")] * n)),
        ("duration", lambda n: pa.array([1e30] * n)),
        ("duration", lambda n: pa.array([-5.0] * n)),
        ("start_ts", lambda n: pa.array([float("-inf")] * n)),
        ("start_ts", lambda n: pa.array(["now"] * n)),
        ("start_ts", lambda n: pa.array([None] * n, pa.float32())),
        ("rank", lambda n: pa.array([0] * n)),
        ("rank", lambda n: pa.array([-7] * n)),
        ("rank", lambda n: pa.array([1 << 62] * n)),
        ("stage", lambda n: pa.array([-1] * n)),
        ("stage", lambda n: pa.array([1 << 30] * n)),
        ("step", lambda n: pa.array([[1]] * n)),
        ("step", lambda n: pa.array([None] * n, pa.int64())),
        ("optype", lambda n: pa.array([f"kind {i}" for i in range(n)])),
        ("seq_id", lambda n: pa.array([0.5] * n)),
    ],
)
def test_a_column_that_makes_no_sense_is_one_clear_line(
    tmp_path: Path, column: str, values: Callable[[int], pa.Array]
):
    result = table(rows(Job()))
    changed = result.set_column(result.column_names.index(column), column, values(len(result)))
    pq.write_table(changed, tmp_path / "trace.parquet")
    with pytest.raises(BadTrace) as caught:
        IMPORTER.read(tmp_path / "trace.parquet")
    assert "\n" not in str(caught.value)


def test_files_without_rows_or_with_excess_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(table(rows(Job(n_steps=4)))[:0], tmp_path / "none.parquet")
    with pytest.raises(BadTrace, match="no operations"):
        IMPORTER.read(tmp_path / "none.parquet")
    n = 5_000_000  # a few kilobytes, since all rows are equal
    same = {name: pa.array(np.zeros(n, np.int8)) for name in ("step", "rank", "stage", "dp_rank", "seq_id")}
    same |= {name: pa.array(np.zeros(n, np.float32)) for name in ("start_ts", "duration")}
    same["optype"] = pa.DictionaryArray.from_arrays(np.zeros(n, np.int8), ["gc"])
    pq.write_table(pa.table(same), tmp_path / "many.parquet")
    with pytest.raises(BadTrace, match="5,000,000 rows"):
        IMPORTER.read(tmp_path / "many.parquet")


def _whole() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows(Job(n_stages=2, n_replicas=2, n_steps=6, n_batches=2))), sink)
    return sink.getvalue().to_pybytes()


_WHOLE = _whole()


@settings(max_examples=150)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(_WHOLE) - 1), st.binary(max_size=4), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    )
)
def test_a_damaged_file_is_an_error_or_a_trace(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, bytes, int]]
):
    data = _WHOLE
    for at, put, n_removed in cuts:
        data = data[:at] + put + data[at + n_removed :]
    file = tmp_path_factory.mktemp("damaged") / "trace.parquet"
    file.write_bytes(data)
    try:
        trace = IMPORTER.read(file) if importer_for(file) is IMPORTER else None
    except BadTrace as error:
        assert "\n" not in str(error)
    else:
        if trace is not None:
            report_of(trace)


def test_operation_names_with_invalid_utf8_are_an_error(tmp_path: Path):
    result = table(rows(Job()))
    offsets = np.arange(len(result) + 1, dtype=np.int32)
    words = pa.StringArray.from_buffers(
        len(result), pa.py_buffer(offsets), pa.py_buffer(b"\x80" * len(result)), None, 0
    )
    changed = result.set_column(result.column_names.index("optype"), "optype", words)
    pq.write_table(changed, tmp_path / "trace.parquet")
    with pytest.raises(BadTrace, match=r"not a readable Parquet file .*Invalid UTF8"):
        IMPORTER.read(tmp_path / "trace.parquet")


@pytest.mark.parametrize("word", ["x" * 30_000_000, "x" * 20_000, None, b"\xff"])
def test_long_or_missing_words_are_not_written_out_for_every_row(tmp_path: Path, word: str | bytes | None):
    result = table(rows(Job()))
    kind = pa.binary() if isinstance(word, bytes) else pa.string()
    words = pa.DictionaryArray.from_arrays(np.zeros(len(result), np.int8), pa.array([word or ""], kind))
    if word is None:
        words = pa.array([None] * len(result), kind)
    changed = result.set_column(result.column_names.index("optype"), "optype", words)
    pq.write_table(changed, tmp_path / "trace.parquet", compression="zstd")
    assert (tmp_path / "trace.parquet").stat().st_size < 1_000_000
    script = (
        "import sys; from pathlib import Path\n"
        "from stallscope.errors import BadTrace\n"
        "from stallscope.importers.pipeline_trace import IMPORTER\n"
        "try: IMPORTER.read(Path(sys.argv[1]))\n"
        "except BadTrace as error: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "trace.parquet")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    assert int(done.stdout.split()[0]) < 1 << 20  # KiB
