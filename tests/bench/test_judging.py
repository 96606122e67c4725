"""The judge of the proof on real GPUs is neither blind nor lenient."""

import json
from pathlib import Path
from typing import Any

import judging
import pytest

STEP_NS = 10_000_000
DELAY_NS = 290_000_000
PERIOD = 14


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of two ranks; rank 1 sleeps every 14 steps."""
    fault = {"name": "sleep", "cause": "host_sleep", "rank": 1, "every_steps": PERIOD}
    truth = {"n_ranks": 2, "faults": [fault], "stopped_ns": []}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    for rank in range(2):
        lines, now = ["step,start_ns,begin_ns,forward_ns,end_ns,is_disturbed"], 0
        for step in range(60):
            late = rank == 1 and step % PERIOD == 6
            begin = now + 1_000 + late * DELAY_NS
            lines.append(f"{step},{now},{begin},{begin + 1},{begin + STEP_NS},{int(late)}")
            now = begin + STEP_NS
        (tmp_path / f"rank{rank}.csv").write_text("\n".join(lines) + "\n60,17")
    return tmp_path


def test_memory_that_is_allocated_again_after_an_allocator_fault_counts_as_its_delay(tmp_path: Path):
    """The caches are empty after the fault: the forward pass asks the driver again."""
    fault = {"name": "alloc", "cause": "cuda_alloc", "rank": 0, "every_steps": 5}
    (tmp_path / "truth.json").write_text(json.dumps({"n_ranks": 1, "faults": [fault], "stopped_ns": []}))
    lines = ["step,start_ns,begin_ns,forward_ns,end_ns,is_disturbed"]
    for step in range(40):
        is_due, start = int(step % 5 == 4), step * STEP_NS
        begin = start + 1_000 + is_due * 14_000_000
        lines.append(f"{step},{start},{begin},{begin + 1_000_000 + is_due * 15_000_000},{start},{is_due}")
    (tmp_path / "rank0.csv").write_text("\n".join(lines) + "\n")
    (truth,) = judging.truths(tmp_path)
    assert truth.delay_ms == pytest.approx(29, abs=0.1)


def verdict(**differing: Any) -> dict[str, Any]:
    """The right result, with these fields changed."""
    right = {
        "kind": "straggler",
        "ranks": [1],
        "n_incidents": 4,
        "causes": [{"cause": "host_sleep", "share": 0.99, "excess_ms": 1160.0}],
        "period_steps": PERIOD,
        "late_ms": {"median": 291.0, "max": 292.0},
        "abstained_because": None,
    }
    return right | differing


def report(*verdicts: dict[str, Any], n_lost: int = 0) -> dict[str, Any]:
    answer = "found" if verdicts else "healthy"
    return {"answer": answer, "verdicts": list(verdicts), "examined": {"n_lost_records": n_lost}}


def test_the_truth_comes_from_the_ranks_own_clock(folder: Path):
    (truth,) = judging.truths(folder)
    assert (truth.rank, truth.period, truth.delay_ms) == (1, PERIOD, pytest.approx(290))


def test_the_right_answer_is_right(folder: Path):
    assert judging.judged("sleep", folder, report(verdict())).wrong == []


@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        ({"ranks": [0]}, "named [0], not [1]"),
        ({"ranks": [0, 1]}, "named [0, 1], not [1]"),
        ({"causes": [{"cause": "block_io", "share": 1.0, "excess_ms": 1160.0}]}, "cause block_io"),
        ({"causes": [{"cause": "host_sleep", "share": 0.5, "excess_ms": 1160.0}]}, "only 50%"),
        ({"causes": []}, "not host_sleep"),
        ({"period_steps": 7}, "period 7"),
        ({"period_steps": None}, "period None"),
        ({"late_ms": {"median": 250.0, "max": 300.0}}, "late 250.0 ms, not 290.0"),
        ({"kind": "hang"}, "kind hang"),
    ],
)
def test_differences_from_the_truth_are_listed(folder: Path, differing: dict[str, Any], expected: str):
    assert expected in "; ".join(judging.judged("sleep", folder, report(verdict(**differing))).wrong)


def test_silence_lost_records_and_a_verdict_too_many_are_wrong(folder: Path):
    assert judging.judged("sleep", folder, report()).wrong
    assert judging.judged("sleep", folder, report(verdict(), n_lost=3)).wrong == ["3 records lost"]
    more = verdict(kind="inconclusive", ranks=[])
    assert judging.judged("sleep", folder, report(verdict(), more)).wrong == ["also reported inconclusive"]


def test_any_verdict_on_a_healthy_job_is_wrong(folder: Path):
    (folder / "truth.json").write_text(json.dumps({"n_ranks": 2, "faults": [], "stopped_ns": []}))
    assert not judging.judged("healthy", folder, report()).wrong
    assert judging.judged("healthy", folder, report(verdict())).wrong
    assert judging.judged("healthy", folder, report(verdict(kind="imbalance", ranks=[]))).wrong
