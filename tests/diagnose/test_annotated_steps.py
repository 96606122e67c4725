"""Annotated steps take precedence over detected steps, for the annotated process and for its peers."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.timeline.annotated_steps import annotated_steps
from stallscope.diagnose.timeline.programs import programs_of
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events import layout
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Trace

from .builders import MS, dp_trace, every
from .reports import report_of

ROUNDS = 3


def telling(trace: Trace, *, rank: int = 0, every_rounds: int = ROUNDS, pid: int | None = None) -> Trace:
    """The trace in which one rank annotates a step before every n-th of its rounds; values from 1000 on."""
    own = trace.collectives[trace.collectives["pid"] == 1000 + rank]["ts_ns"][::every_rounds]
    rows = layout.empty(layout.ANNOTATIONS, len(own))
    rows["ts_ns"], rows["pid"], rows["label"] = own - 1, 1000 + rank if pid is None else pid, b"step"
    rows["value"] = [str(1000 + i).encode() for i in range(len(own))]
    return replace(trace, annotations=rows)


def steps(trace: Trace) -> dict[int, list[int]]:
    """The step of each round, by rank."""
    timeline = timeline_of(trace)
    programs = programs_of(timeline, annotated_steps(trace, timeline))
    return {
        int(timeline.rank[p]): programs.step[timeline.process == p].tolist()
        for p in range(timeline.n_processes)
    }


def test_annotated_steps_apply_to_all_ranks_of_the_program():
    result = steps(telling(dp_trace(), every_rounds=6))
    assert result == {rank: [i // 6 for i in range(120)] for rank in range(4)}


def test_steps_annotated_for_the_whole_machine_are_used():
    result = steps(telling(dp_trace(), every_rounds=6, pid=0))
    assert result[3][6:12] == [1] * 6


def test_there_are_no_annotated_steps_without_labels():
    assert annotated_steps(dp_trace(), timeline_of(dp_trace())) is None


def test_a_few_labels_at_the_end_are_not_enough():
    trace = telling(dp_trace())
    trace = replace(trace, annotations=trace.annotations[-3:])
    plain = steps(dp_trace())
    assert steps(trace) == plain


def test_other_labels_are_not_steps():
    trace = telling(dp_trace())
    trace.annotations["label"] = b"epoch"
    assert annotated_steps(trace, timeline_of(trace)) is None


def test_the_period_is_counted_in_annotated_steps():
    """Two detected steps are one step of the job: every 8th detected step is every 4th step of the job."""
    trace = dp_trace(every(2, 8, 50 * MS, first=4, until=120), n_steps=120)
    assert diagnose(trace).verdicts[0].period_steps == 8
    assert diagnose(telling(trace, every_rounds=2 * ROUNDS)).verdicts[0].period_steps == 4


def test_the_rows_before_the_first_label_have_no_step():
    trace = telling(dp_trace())
    trace = replace(trace, annotations=trace.annotations[5:])
    timeline = timeline_of(trace)
    annotated = annotated_steps(trace, timeline)
    assert annotated is not None
    assert annotated[timeline.process == 0][: 5 * ROUNDS].tolist() == [-1] * 15
    assert np.all(annotated[timeline.process == 0][5 * ROUNDS :] >= 0)


def test_marked_steps_of_a_profiler_are_all_judged() -> None:
    """Its schedule begins after the warm-up; five active steps are typical."""
    trace = dp_trace(every(2, 1, 30 * MS, first=0, until=5), n_steps=5)
    trace.collectives["flags"] |= int(CollectiveFlag.NO_SYSCALLS)
    begins = np.sort(trace.collectives["ts_ns"][trace.collectives["seq"] % 3 == 0].reshape(5, -1).min(axis=1))
    marks = layout.empty(layout.ANNOTATIONS, 5)
    marks["ts_ns"], marks["label"] = begins - 31 * MS, b"step"
    report = report_of(replace(trace, annotations=marks))
    assert report.examined["n_steps"] == 5
    assert [verdict.ranks for verdict in report.verdicts] == [[2]]
