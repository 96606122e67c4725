"""Verdicts on GPUs that are held without use: in a whole trace, in a stream, and next to a healthy job."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose import Stream, Thresholds, diagnose, idle_holders
from stallscope.diagnose.report import text
from stallscope.diagnose.verdicts import held_gpus
from stallscope.events import layout
from stallscope.events.trace import Clock, Coverage, Gap, Trace

from .builders import dp_trace
from .cutting import Hand

S = 10**9
WALL_NS = 1_796_000_000 * S
SINCE_S, UNTIL_S = 100, 3700


def idle_rows(
    *, until_s: int = UNTIL_S, is_idle: int = 1, gpus: tuple[str, ...] = ("0", "1")
) -> layout.Array:
    """Rows of each minute, from the start of the idle time on."""
    times = range(SINCE_S + 30, until_s + 1, 60)
    rows = layout.empty(layout.IDLE_GPUS, len(times) * len(gpus))
    rows["ts_ns"] = np.repeat([at * S for at in times], len(gpus))
    rows["gpu"] = [gpu.encode() for gpu in gpus] * len(times)
    rows["holder"], rows["reason"], rows["since_ns"], rows["is_idle"] = (
        b"job 1",
        b"no GPU calls",
        SINCE_S * S,
        1,
    )
    rows["owner_user"], rows["owner_job_name"], rows["owner_job"] = b"ann", b"notebook", b"1"
    rows["is_idle"][-len(gpus) :] = is_idle
    return rows


def held(**changes) -> Trace:
    return Trace(idle_gpus=idle_rows(**changes), nodes=("host-a",), clocks=(Clock(0, 0, WALL_NS),))


def test_the_holder_is_named_with_owner_price_and_begin():
    report = diagnose(held(), usd_per_gpu_hour=2.0)
    (verdict,) = report.verdicts
    last_s = int(held().idle_gpus["ts_ns"].max()) // S
    hours = (last_s - SINCE_S) / 3600
    assert verdict.kind == "idle"
    assert verdict.owner == {"job": "1", "job_name": "notebook", "user": "ann"}
    assert verdict.since_ns == WALL_NS + SINCE_S * S
    assert round(verdict.cost.gpu_seconds / 3600, 3) == round(2 * hours, 3)
    assert verdict.cost.usd_per_hour == 4.0
    assert report.answer == "found"
    assert (
        "job 1 (notebook) of ann has held 2 GPUs on host-a without use for 60 min: no GPU calls."
        in text.report(report)
    )


def test_gpus_that_are_used_again_or_idle_for_a_short_time_are_no_verdict():
    assert diagnose(held(is_idle=0)).verdicts == []
    assert diagnose(held(until_s=SINCE_S + 200)).verdicts == []


def test_a_healthy_job_next_to_idle_gpus_keeps_its_report():
    trace = replace(dp_trace(), idle_gpus=idle_rows())
    assert [verdict.kind for verdict in diagnose(trace).verdicts] == ["idle"]
    assert diagnose(dp_trace()).verdicts == []


def test_without_a_limit_no_idle_time_is_reported():
    assert diagnose(held(), Thresholds(idle_after_ns=0)).verdicts == []


def test_idle_gpus_do_not_hide_the_gaps_of_a_trace():
    gap = Gap("the agent was not there", "Trace again.")
    trace = replace(held(), coverage=Coverage(gaps=(gap,)))
    assert gap in diagnose(trace).gaps


def test_two_reasons_of_one_holder_are_two_holders():
    rows = np.concatenate([idle_rows(gpus=("0",)), idle_rows(gpus=("1",))])
    rows["reason"][rows["gpu"] == b"1"] = b"no process uses it"
    assert sorted(holder.gpus for holder in idle_holders(rows)) == [("0",), ("1",)]


def test_a_stream_opens_an_incident_and_closes_it_when_the_gpus_are_used():
    clock = Hand()
    clock.now_ns = WALL_NS + UNTIL_S * S
    stream = Stream(limits=Thresholds(), clock=clock)
    changes = [*stream.feed(held()), *stream.tick()]
    assert [(change.kind, change.verdict.kind, change.verdict.owner["user"]) for change in changes] == [
        ("opened", "idle", "ann")
    ]
    assert stream.n_jobs == 1
    clock.now_ns += 60 * S
    ended = idle_rows(is_idle=0)
    changes = [*stream.feed(replace(held(), idle_gpus=ended[-2:])), *stream.tick()]
    assert [change.kind for change in changes] == ["closed"]
    assert stream.n_jobs == 0


def test_a_stream_evaluates_idle_gpus_after_new_rows_only(monkeypatch):
    clock, evaluated = Hand(), []
    clock.now_ns = WALL_NS + UNTIL_S * S
    verdicts = held_gpus.verdicts
    monkeypatch.setattr(held_gpus, "verdicts", lambda *given: evaluated.append(1) or verdicts(*given))
    stream = Stream(limits=Thresholds(), clock=clock)
    stream.feed(held())
    for _ in range(5):
        clock.now_ns += 2 * S
        stream.tick()
    assert len(evaluated) == 1
    (confirmed_ns,) = stream.confirmed_ns().values()
    assert confirmed_ns == clock.now_ns


def test_beyond_the_limit_the_rows_that_arrived_first_are_dropped(monkeypatch):
    monkeypatch.setattr("stallscope.diagnose.stream.idle_incidents._MAX_ROWS", 2)
    clock = Hand()
    clock.now_ns = WALL_NS + UNTIL_S * S
    stream = Stream(limits=Thresholds(), clock=clock)
    stream.feed(Trace())  # the next pass is a second later
    stream.feed(held(gpus=("0", "1")))
    stream.feed(held(gpus=("2",)))
    (change,) = stream.tick()
    assert change.verdict.evidence.idle_gpus == ["1", "2"]


def test_a_verdict_names_the_process_that_holds_the_gpus():
    rows = idle_rows()
    rows["pid"] = 77
    (verdict,) = diagnose(replace(held(), idle_gpus=rows)).verdicts
    assert verdict.pids == [77]
    assert diagnose(held()).verdicts[0].pids == []


def test_a_process_without_collectives_is_a_job_with_begin_and_end():
    processes, states = layout.empty(layout.PROCESSES, 1), layout.empty(layout.SNAPSHOTS, 3)
    processes["pid"], processes["ts_ns"], processes["ended_ns"] = 7, 10 * S, layout.UNKNOWN
    states["pid"], states["ts_ns"], states["alive"] = 7, [20 * S, 30 * S, 40 * S], 1
    clock = Hand()
    clock.now_ns = WALL_NS + 40 * S
    stream = Stream(limits=Thresholds(), clock=clock)
    stream.feed(
        Trace(processes=processes, snapshots=states, nodes=("host-a",), clocks=(Clock(0, 0, WALL_NS),))
    )
    (job,) = stream.jobs()
    assert (job.begin_ns, job.last_ns) == (WALL_NS + 10 * S, WALL_NS + 40 * S)


def test_an_agent_that_stops_reporting_leaves_no_open_incident():
    clock = Hand()
    clock.now_ns = WALL_NS + UNTIL_S * S
    stream = Stream(limits=Thresholds(), clock=clock)
    stream.feed(held())
    clock.now_ns += 601 * S
    assert [change.kind for change in stream.tick()] == ["closed"]
