"""Ranks that made no progress before the capture began: the rank that probably blocks them, or no name."""

from dataclasses import replace

import pytest

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Answer
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, HostKind
from stallscope.events.trace import Trace

S = 10**9
WAITS = (
    "syscall+0x19 (libc.so.6)",
    "cudaStreamSynchronize+0x55 (libcudart.so.12)",
    "/job/train.py:186 train",
)
SLEEPS = ("clock_nanosleep+0x65 (libc.so.6)", "/job/data.py:20 fetch", "/job/train.py:170 train")
RUNS = ("/job/data.py:31 parse", "/job/train.py:170 train")
BACKWARD = ("0x85f16 (libc.so.6)", "_ZN5torch4wait+0x1 (libtorch_cpu.so)", "/job/train.py:188 train")


def trace(*stands: tuple[str, ...], looks_s: tuple[int, ...] = (3, 8, 13), n_collectives: int = 0) -> Trace:
    """Rank i is at location stands[i] in each sample."""
    n = len(stands)
    processes = layout.empty(layout.PROCESSES, n)
    processes["pid"], processes["rank"], processes["nranks"] = range(100, 100 + n), range(n), n
    processes["ended_ns"], processes["ts_ns"] = UNKNOWN, 3 * S
    snapshots = rows_of(layout.SNAPSHOTS, n, looks_s)
    snapshots["alive"], snapshots["category"], snapshots["syscall_nr"] = 1, Category.SLEEP, 230
    snapshots["n_collectives"] = n_collectives
    positions = rows_of(layout.POSITIONS, n, looks_s)
    positions["tid"], positions["stack"] = positions["pid"], positions["pid"]
    stacks = {100 + i: frames for i, frames in enumerate(stands)}
    return Trace(
        source="a test",
        nodes=("here",),
        processes=processes,
        snapshots=snapshots,
        positions=positions,
        stacks=stacks,
    )


def rows_of(table: layout.Table, n: int, looks_s: tuple[int, ...]) -> Array:
    rows = layout.empty(table, n * len(looks_s))
    rows["pid"] = [100 + i for _ in looks_s for i in range(n)]
    rows["ts_ns"] = [second * S for second in looks_s for _ in range(n)]
    return rows


def assert_not_decided(report):
    """No verdict, and no claim of health: positions alone show no round and no step."""
    assert (report.verdicts, report.answer) == ([], Answer.INCONCLUSIVE)


def test_the_rank_in_other_code_probably_blocks_the_waiting_ranks():
    report = diagnose(trace(WAITS, WAITS, SLEEPS, WAITS))
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [2], [0, 1, 3])
    assert verdict.confidence < 0.7
    assert "the data does not show" in str(verdict.abstained_because)
    assert verdict.cost is not None
    assert verdict.cost.gpu_seconds == pytest.approx(30)
    message = text.report(report)
    assert "Attached after the stall began: all 4 ranks have made no progress for at least 10.0 s" in message
    assert "likely wait for rank 2; it is at data.py:20 fetch instead (state sleep)" in message


@pytest.mark.parametrize(
    ("stands", "because"),
    [
        ((WAITS, WAITS, WAITS), "all ranks wait for the GPU or NCCL"),
        ((WAITS, SLEEPS, SLEEPS), "1 waiting for the GPU or NCCL, 2 in other code"),
        ((WAITS, WAITS, RUNS), "2 waiting for the GPU or NCCL, 1 unknown"),
        ((WAITS, WAITS, BACKWARD), "1 unknown"),
        ((SLEEPS, SLEEPS), "2 in other code"),
    ],
)
def test_no_rank_is_named_if_the_stacks_are_ambiguous(stands, because):
    (verdict,) = diagnose(trace(*stands)).verdicts
    assert verdict.ranks == []
    assert because in str(verdict.abstained_because)
    assert because in verdict.summary
    assert len(verdict.evidence.doing) == len(stands)


@pytest.mark.parametrize(("status", "is_told"), [(128 + 9, True), (0, False)])
def test_a_job_killed_during_a_standstill_is_reported(status, is_told):
    given = trace(WAITS, SLEEPS, WAITS)
    given.processes["ended_ns"] = 14 * S
    exits = layout.empty(layout.HOST_EVENTS, 3)
    exits["pid"], exits["ts_ns"], exits["kind"] = given.processes["pid"], 14 * S, HostKind.EXIT
    exits["value"] = status
    verdicts = diagnose(replace(given, host_events=exits)).verdicts
    assert [verdict.ranks for verdict in verdicts] == ([[1]] if is_told else [])


def test_confidence_is_lower_with_two_ranks():
    (two,) = diagnose(trace(WAITS, SLEEPS)).verdicts
    (four,) = diagnose(trace(WAITS, SLEEPS, WAITS, WAITS)).verdicts
    assert two.ranks == four.ranks == [1]
    assert two.confidence < four.confidence


@pytest.mark.parametrize("looks_s", [(3,), (3, 8), (3, 8, 12)])
def test_a_standstill_shorter_than_a_hang_is_not_reported(looks_s):
    assert_not_decided(diagnose(trace(WAITS, SLEEPS, WAITS, looks_s=looks_s)))


def test_a_standstill_is_not_reported_while_a_rank_makes_progress():
    moving = trace(WAITS, SLEEPS, WAITS)
    moving.stacks[7] = ("/job/data.py:21 fetch",)
    moving.positions["stack"][4] = 7  # rank 1 at the second look
    assert_not_decided(diagnose(moving))


def test_ranks_that_have_made_collectives_are_for_others_to_judge():
    """As in a part of a trace that begins after the last round."""
    assert_not_decided(diagnose(trace(WAITS, SLEEPS, n_collectives=7)))


def test_a_single_rank_does_not_wait_for_another_rank():
    assert_not_decided(diagnose(trace(SLEEPS)))


def test_children_of_ranks_that_look_like_ranks_are_left_out():
    output = trace(WAITS, WAITS, SLEEPS, WAITS, SLEEPS, RUNS, RUNS)
    output.processes["rank"], output.processes["nranks"] = [0, 1, 2, 3, 0, 2, 2], 4
    (verdict,) = diagnose(output).verdicts
    assert (verdict.ranks, verdict.victims) == ([2], [0, 1, 3])
    assert "fetch" in verdict.advice[0]


def test_a_helper_without_python_that_waits_is_not_the_rank():
    output = trace(WAITS, WAITS, SLEEPS, WAITS, WAITS[:2], WAITS[:2])
    output.processes["rank"], output.processes["nranks"] = [0, 1, 2, 3, 2, 0], 4
    (verdict,) = diagnose(output).verdicts
    assert verdict.victims == [0, 1, 3]


def test_no_rank_is_named_if_two_processes_with_the_same_rank_wait():
    output = trace(WAITS, WAITS, SLEEPS, WAITS)
    output.processes["rank"] = [0, 1, 2, 0]
    (verdict,) = diagnose(output).verdicts
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert "processes 100 " in (verdict.abstained_because or "")
