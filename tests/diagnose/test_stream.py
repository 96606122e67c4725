"""Events that keep arriving: the same blame as for the whole, in time, and with bounded state."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.demo.recorded_job import recorded
from stallscope.diagnose.cost.delays import delays_by_process, total
from stallscope.diagnose.findings import findings
from stallscope.diagnose.report.verdict import Answer, Verdict
from stallscope.diagnose.stream import JobState, Retention, Stream
from stallscope.diagnose.stream.history import quiet_steps
from stallscope.diagnose.stream.incidents import UNCERTAIN, Candidate, Incidents
from stallscope.diagnose.stream.stream_job import Job as StreamJob
from stallscope.diagnose.stream.window import complete
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import case_of
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.importers import importer_for
from stallscope.synth import Capture, HostStall, Schedule, simulate
from stallscope.synth import Job as SimulatedJob
from stallscope.synth.fault_scenarios import healthy, scene

from .builders import MS, Call, Gone, Job, dp_trace, every, trace_of, where
from .cutting import Cut, Hand, batches, told
from .reports import blamed, report_of
from .test_recordings import FOLDER, TRUTHS

FEW = settings(max_examples=4)
SECOND = 1_000 * MS
NESTED = (Call(((0, 1), (2, 3)), count=10, waits=True), Call(((0, 2), (1, 3)), count=500, waits=True))
BUILT = {
    "data": dp_trace(every(2, 5, 50 * MS, category=Category.IO)),
    "nested": trace_of(Job(NESTED, delays=tuple(every(1, 4, 50 * MS)))),
    "two nodes": dp_trace(
        every(3, 4, 60 * MS, category=Category.LOCK), node=(0, 0, 1, 1), offset_ns=(0, 77 * SECOND)
    ),
    "healthy": dp_trace(),
}
SIMULATED = (
    ("dp8", "block_io"),
    ("dp8", "two_culprits"),
    ("dp8-tp2", "lock_contention"),
    ("dp4-pp4", "host_sleep"),
    ("dp16-ep8", "slow_node"),
    ("dp8", "moving_imbalance"),
    ("dp8", "moving_imbalance_on_device"),
    ("dp8", "gpu_slow"),
    ("fsdp8", "mismatch_count"),
    ("dp8-tp2", "missing_asleep"),
    ("dp8", "dead_process"),
)
ROWS_OF_A_LOOK = 10_000  # the fixed cost of an evaluation, in addition to its rows
SMALL = Retention(min_rows=1_000, n_steps=48)


@cache
def trace_named(name: str) -> Trace:
    return recorded() if name == "shipped" else BUILT[name]


@cache
def simulated(shape: str, fault: str) -> Trace:
    return scene(shape, fault, 5)[0]


def same_in(trace: Trace, cut: Cut) -> None:
    """The verdicts on the batches equal the verdicts on the whole trace, and each culprit was reported in time."""
    whole = report_of(trace)
    changes = told(trace, cut)
    assert blamed(changes.report) == blamed(whole)
    firm = {(kind, ranks) for kind, ranks, *_ in blamed(whole) if kind != "inconclusive"}
    # Before a node's rows have arrived, a hang may name no rank.
    assert firm <= {*changes.opened, *changes.updated}
    assert [entry.incident_id for entry in changes.of("opened")] == list(
        dict.fromkeys(entry.incident_id for entry in changes.of("opened"))
    )
    assert {entry.incident_id for entry in changes.of("opened")} == {
        entry.incident_id for entry in changes.of("closed")
    }
    assert all(entry.reason for entry in changes.of("closed"))


cuts = st.builds(
    Cut,
    n=st.integers(1, 60),
    behind_ns=st.dictionaries(st.integers(0, 1), st.integers(0, 4 * SECOND)),
    apart=st.booleans(),
)


@pytest.mark.parametrize("name", [*BUILT, "shipped"])
@FEW
@given(cut=cuts)
def test_batches_give_the_blame_of_the_whole(name, cut):
    same_in(trace_named(name), cut)


@pytest.mark.parametrize(("shape", "fault"), SIMULATED)
@settings(max_examples=2)
@given(cut=cuts)
def test_batches_of_simulated_faults_give_the_blame_of_the_whole(shape, fault, cut):
    same_in(simulated(shape, fault), cut)


@pytest.mark.shared
@pytest.mark.parametrize("name", TRUTHS or [pytest.param("none")])
def test_batches_of_a_recording_give_the_blame_of_the_whole(name, recordings):
    folder = FOLDER / name
    same_in(importer_for(folder).read(folder), Cut(37))


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_job_has_no_incidents(seed):
    trace, _ = healthy(seed)
    if not len(trace.collectives):
        return
    behind = {node: node * SECOND // 2 for node in range(len(trace.nodes))}
    changes = told(trace, Cut(25, behind_ns=behind, apart=True))
    assert changes.changes == []
    assert changes.report.verdicts == []


def test_a_straggler_is_named_with_its_third_late_step():
    trace = dp_trace(every(2, 5, 50 * MS, first=12, until=40, category=Category.IO), n_steps=60)
    third_ns = late_steps_at(trace, rank=2)[2]
    clock, changes = Hand(), []
    stream = Stream(clock=clock)
    for at_ns, batch in batches(trace, Cut(120)):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    opened = changes[0]
    assert (opened.kind, opened.verdict.ranks, opened.verdict.causes[0].cause.name) == (
        "opened",
        [2],
        "block_io",
    )
    step_ns = 10 * MS
    assert 0 <= opened.at_ns - third_ns < 3 * step_ns
    assert opened.verdict.evidence.n_late_steps == 3


def late_steps_at(trace: Trace, *, rank: int) -> list[int]:
    """When a rank of a simulated job arrived after each of its delays, by the wall clock."""
    rows = trace.collectives[trace.collectives["pid"] == 1000 + rank]
    late = np.flatnonzero(np.diff(rows["ledger_ns"][:, Category.IO - 1]) > 0) + 1
    clock = trace.clocks[0]
    return (rows["ts_ns"][late] + clock.wall_ns - clock.monotonic_ns).tolist()


def test_a_recurrence_after_recovery_is_a_separate_incident():
    delays = [
        *every(2, 3, 50 * MS, first=10, until=40, category=Category.IO),
        *every(2, 3, 50 * MS, first=200, until=221, category=Category.IO),
    ]
    changes = told(dp_trace(delays, n_steps=400), Cut(100))
    first, second = changes.of("closed")
    assert [entry.reason.split(" for ")[0] for entry in (first, second)] == ["on time", "on time"]
    assert first.incident_id != second.incident_id
    assert [entry.verdict.evidence.n_late_steps for entry in (first, second)] == [10, 7]
    assert first.verdict.until_ns < second.verdict.since_ns
    assert changes.report.verdicts[0].evidence.n_late_steps == 17


def test_a_growing_incident_is_updated_and_its_cost_never_decreases():
    changes = told(dp_trace(every(1, 2, 40 * MS), n_steps=60), Cut(60), usd_per_gpu_hour=2.0)
    costs = [change.verdict.cost.gpu_seconds for change in changes.changes]
    assert len(changes.of("updated")) >= 2
    assert costs == sorted(costs)
    assert len({change.verdict.since_ns for change in changes.changes}) == 1
    assert changes.changes[-1].verdict.cost.usd > 0


def test_the_same_batches_give_the_same_changes():
    trace = simulated("dp8", "two_culprits")
    assert told(trace, Cut(20)).changes == told(trace, Cut(20)).changes


def long_trace(n_steps: int) -> Trace:
    fault = HostStall(
        cause="block_io", ranks=(3,), delay_ns=80 * MS, schedule=Schedule(first=20, every=7), spread=0.05
    )
    return simulate(SimulatedJob(dp=4, steps=n_steps), (fault,), seed=4, has_twin=False)[0]


def test_ten_times_more_events_leave_no_more_rows_and_cost_is_counted_once():
    few, many = long_trace(200), long_trace(2000)
    kept = []
    for trace in (few, many):
        clock = Hand()
        stream = Stream(clock=clock, retention=SMALL)
        most = 0
        for at_ns, batch in batches(trace, Cut(len(trace.collectives) // 500)):
            clock.now_ns = at_ns
            stream.feed(batch)
            most = max(most, stream.n_rows)
        kept.append(most)
        whole, report = report_of(trace), stream.report()
        assert blamed(report) == blamed(whole)
        verdict, other = report.verdicts[0], whole.verdicts[0]
        assert verdict.cost.gpu_seconds == pytest.approx(other.cost.gpu_seconds, rel=0.05)
        assert verdict.evidence.n_late_steps == pytest.approx(other.evidence.n_late_steps, rel=0.02)
        assert verdict.n_rounds == pytest.approx(other.n_rounds, rel=0.05)
        assert verdict.since_ns == pytest.approx(other.since_ns, abs=MS)
        assert verdict.period_steps == 7
    between_looks = (SMALL.min_rows + ROWS_OF_A_LOOK) / 8
    assert max(kept) <= SMALL.min_rows + between_looks + 500 < len(few.collectives)


def test_a_job_with_too_many_rows_is_evaluated_although_it_is_behind_or_has_few_steps():
    """Only an evaluation drops old rows: with fewer evaluations they would become ever more."""
    rows = layout.empty(layout.COLLECTIVES, 40_000)
    rows["ts_ns"], rows["nranks"], rows["comm_hash"] = np.arange(len(rows)), 1, 1
    job = StreamJob("job", Thresholds(), Retention(), None)
    empty = {table.name: layout.empty(table) for table in layout.JOB_TABLES}
    job.add(empty | {"collectives": rows}, at_ns=0)
    job.trigger.is_due, job._n_since = False, 8_000
    assert job.is_due(max_rows=80_000)
    assert not job.is_due(max_rows=80_000, is_behind=True)
    assert job.is_due(max_rows=40_000, is_behind=True)
    job._enough_rows = 60_000
    assert not job.is_due(max_rows=80_000)
    assert job.is_due(max_rows=40_000)


def test_rows_that_were_thinned_out_are_counted_although_the_job_has_ended():
    trace, clock = dp_trace(n_steps=300), Hand()
    stream = Stream(clock=clock)
    stream.feed(trace)
    n_before = stream.n_rows
    stream.thin_out()
    n_dropped = n_before - stream.n_rows
    clock.now_ns += 3600 * SECOND
    stream.tick()
    assert stream.n_jobs == 0 < n_dropped
    n_left_out, k = stream.left_out()
    assert 0 < n_left_out <= n_dropped and k == 2
    assert stream.left_out() == (0, 1)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("is_late", [True, False])
def test_rounds_that_are_thinned_out_while_a_node_is_behind_have_the_rows_of_all_ranks(is_late, behind):
    delays = every(3, 5, 60 * MS, category=Category.LOCK) if is_late else ()
    trace = dp_trace(delays, node=(0, 0, 1, 1), offset_ns=(0, 77 * SECOND), n_steps=300)
    clock, n_left_out = Hand(), 0
    stream = Stream(clock=clock, retention=SMALL)
    for at_ns, batch in batches(trace, Cut(60, behind_ns={behind: 2 * SECOND})):
        clock.now_ns = at_ns
        stream.feed(batch)
        if stream.n_rows > 1_000:
            stream.thin_out()
        n, _ = stream.left_out()
        n_left_out += n
    assert n_left_out > len(trace.collectives) // 10
    (job,) = stream._jobs.values()
    job.rows.fold()
    rows = job.rows.tables["collectives"]
    _, n_ranks = np.unique(rows[["comm_hash", "seq"]], return_counts=True)
    assert set(n_ranks.tolist()) == {4}
    assert [(verdict.kind, verdict.ranks) for verdict in stream.report().verdicts] == (
        [("straggler", [3])] if is_late else []
    )


def test_each_row_is_looked_at_a_bounded_number_of_times():
    trace = long_trace(600)
    clock = Hand()
    stream = Stream(clock=clock, retention=SMALL)
    for at_ns, batch in batches(trace, Cut(400)):
        clock.now_ns = at_ns
        stream.feed(batch)
    n_evaluations, n_rows = stream.n_evaluations
    allowed = SMALL.max_evaluations * len(trace.collectives) + (4 - n_evaluations) * ROWS_OF_A_LOOK
    assert n_evaluations > 10
    assert n_rows <= allowed


def test_ranks_that_fall_silent_one_after_the_other_are_checked_a_bounded_number_of_times():
    """As of agents that are behind: each has sent all rows up to a moment of its own."""
    n_ranks, apart_ns = 32, 20 * MS
    whole = dp_trace(n_ranks=n_ranks, n_steps=500)
    rows = whole.collectives
    last_ns = int(rows["ts_ns"].max())
    ranks = np.unique(rows["pid"], return_inverse=True)[1]
    trace = where(whole, rows["ts_ns"] < last_ns - apart_ns * (n_ranks - ranks))
    stream = Stream(clock=Hand(last_ns))
    stream.feed(replace(trace, ends_ns=tuple(UNKNOWN for _ in trace.ends_ns)))
    before, _ = stream.n_evaluations
    n_ticks = 2000
    for tick in range(n_ticks):
        stream.tick(last_ns + tick * apart_ns)
    n_checks = stream.n_evaluations[0] - before
    assert 0 < n_checks < n_ranks
    assert stream.report().verdicts


def other_job(trace: Trace, node: str) -> Trace:
    """The same job once more, on a node of another name and with communicators of its own."""
    rows = trace.collectives.copy()
    rows["comm_hash"] ^= np.uint64(0x5555)
    return replace(trace, collectives=rows, nodes=(node,))


def test_jobs_of_one_stream_are_judged_apart():
    slow, fine = BUILT["data"], other_job(dp_trace(seed=3), "elsewhere")
    clock = Hand()
    stream = Stream(clock=clock)
    changes = []
    for (at_ns, entry), (_, other) in zip(batches(slow, Cut(20)), batches(fine, Cut(20)), strict=True):
        clock.now_ns = at_ns
        changes += stream.feed(entry) + stream.feed(other)
    assert {(change.verdict.nodes[0], *change.verdict.ranks) for change in changes} == {("host-a", 2)}
    assert stream.report().examined["n_ranks"] == 8


def test_two_slow_jobs_are_two_incidents():
    slow, too = BUILT["data"], other_job(BUILT["data"], "elsewhere")
    stream = Stream(clock=Hand())
    changes = [
        change
        for trace in (slow, too)
        for _, batch in batches(trace, Cut(5))
        for change in stream.feed(batch)
    ]
    opened = [change for change in changes if change.kind == "opened"]
    assert [change.verdict.nodes for change in opened] == [["host-a"], ["elsewhere"]]
    assert len({change.incident_id for change in opened}) == 2


def test_parts_of_a_job_become_one_when_a_communicator_joins_them():
    """Tensor groups are seen first, and the group that spans them later."""
    early = Call(((0, 1), (2, 3)), count=10)
    world = Call(((0, 1, 2, 3),), count=700, waits=True)
    trace = trace_of(
        Job(
            (world, early),
            extra={0: (early,) * 8},
            delays=tuple(every(2, 4, 50 * MS)),
            node=(0, 0, 1, 1),
            offset_ns=(0, 0),
        )
    )
    changes = told(trace, Cut(30, apart=True))
    assert changes.opened == [("straggler", (2,))]
    assert changes.report.examined["n_ranks"] == 4


HUNG = Job(
    (Call(((0, 1, 2, 3),), waits=True),),
    n_steps=30,
    gone=(Gone(1, 25, category=Category.IO),),
    quiet_ns=30 * SECOND,
)


def test_a_hang_is_reported_within_two_seconds_after_its_limit():
    trace = trace_of(HUNG)
    clock, changes = Hand(), []
    stream = Stream(clock=clock)
    for at_ns, batch in batches(trace, Cut(150)):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    opened = changes[0]
    assert (opened.kind, opened.verdict.kind, opened.verdict.ranks) == ("opened", "hang", [1])
    limit_ns = opened.verdict.since_ns + Thresholds().hang_after_ns
    assert SECOND <= opened.at_ns - limit_ns < 2 * SECOND
    assert {change.kind for change in changes[1:]} == {"updated"}
    assert opened.verdict.victims == [0, 2, 3]


def test_a_silent_job_without_process_states_is_inconclusive():
    """A load generator that stops in the middle of a round: no rank is accused, and the silence costs nothing."""
    trace = replace(trace_of(HUNG), ends_ns=(), snapshots=layout.empty(layout.SNAPSHOTS))
    clock, changes = Hand(), []
    stream = Stream(clock=clock)
    for at_ns, batch in batches(trace, Cut(5)):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    assert changes == []
    for second in range(1, 14):
        changes += stream.tick(clock.now_ns + second * SECOND)
        assert bool(changes) == (second >= 11), second
    verdict = changes[0].verdict
    assert (verdict.kind, verdict.ranks, verdict.cost) == ("inconclusive", [], None)
    assert (verdict.evidence.suspects, verdict.severity) == ([1], "low")
    changes += stream.tick(clock.now_ns + stream.forget_ns + SECOND)
    assert [change.kind for change in changes] == ["opened", "closed"]


def test_an_agent_that_falls_silent_is_not_a_hang():
    """No rank sends rows any more while time passes."""
    trace = dp_trace(n_steps=60)
    clock = Hand()
    stream = Stream(clock=clock)
    for at_ns, batch in list(batches(trace, Cut(40)))[:31]:
        clock.now_ns = at_ns
        assert stream.feed(batch) == []
    assert [change for second in range(60) for change in stream.tick(clock.now_ns + second * SECOND)] == []


def test_a_silent_node_is_not_accused_while_other_nodes_continue():
    delays = every(1, 5, 60 * MS, first=30, until=900)
    trace = dp_trace(delays, node=(0, 0, 1, 1), offset_ns=(0, 0), n_steps=900)
    gone_ns = int(np.quantile(trace.collectives["ts_ns"], 0.2))
    silent = (trace.collectives["node"] == 1) & (trace.collectives["ts_ns"] > gone_ns)
    trace = replace(
        trace,
        collectives=trace.collectives[~silent],
        snapshots=trace.snapshots[:0],
        ends_ns=(trace.ends_ns[0], gone_ns),
    )
    changes = told(trace, Cut(60), retention=Retention(lag_ns=SECOND // 2))
    assert set(changes.opened) == {("straggler", (1,))}


def states_while_host_b_is_silent(trace: Trace) -> list[JobState]:
    """The states of the job of a trace, after each batch; the agent of host-b sends its first rows only."""
    gone_ns = trace.clocks[0].wall_ns + int(np.quantile(trace.collectives["ts_ns"], 0.4))
    clock = Hand()
    stream = Stream(clock=clock, retention=Retention(lag_ns=SECOND // 2))
    states = []
    for at_ns, batch in batches(trace, Cut(60, apart=True)):
        clock.now_ns = at_ns
        if batch.nodes != ("host-b",) or at_ns < gone_ns:
            stream.feed(batch)
        states += stream.jobs()
    return states


def test_a_job_with_a_silent_agent_is_inconclusive_while_other_agents_report():
    answers = states_while_host_b_is_silent(dp_trace(node=(0, 0, 1, 1), offset_ns=(0, 0), n_steps=900))
    assert Answer.HEALTHY in {state.answer for state in answers}
    assert answers[-1].answer == Answer.INCONCLUSIVE
    reason = answers[-1].reasons[0].reason
    assert reason.startswith("host-b has sent no rows for") and "2 of 4 ranks" in reason


def test_ranks_that_have_ended_are_not_counted_among_the_ranks_of_silent_nodes():
    trace = dp_trace(node=(0, 0, 1, 1), offset_ns=(0, 0), n_steps=900)
    processes = trace.processes.copy()
    processes["ended_ns"][np.flatnonzero(processes["node"] == 1)[0]] = trace.collectives["ts_ns"].min()
    processes["ended_ns"][np.flatnonzero(processes["node"] == 0)[0]] = trace.collectives["ts_ns"].min()
    answers = states_while_host_b_is_silent(replace(trace, processes=processes))
    assert "1 of 2 ranks" in answers[-1].reasons[0].reason


def test_a_hang_is_over_when_its_ranks_go_on():
    """A rank is blocked for 20 s, and then continues."""
    stop = dp_trace([*every(1, 1, 20 * SECOND, first=25, until=26)], n_steps=60)
    clock, changes = Hand(), []
    stream = Stream(clock=clock)
    for at_ns, batch in batches(stop, Cut(300)):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    kinds = [
        (change.kind, change.verdict.kind, change.reason)
        for change in changes
        if change.verdict.kind == "hang"
    ]
    assert kinds[0] == ("opened", "hang", "")
    assert kinds[-1] == ("closed", "hang", "the ranks continue")


def test_incidents_of_an_ended_job_are_closed_and_its_rows_discarded():
    trace = BUILT["data"]
    ended = trace.processes.copy()
    ended["ended_ns"] = trace.ends_ns[0]
    trace = replace(trace, processes=ended)
    clock, changes = Hand(), []
    stream = Stream(clock=clock, linger_ns=10 * SECOND)
    for at_ns, batch in batches(trace, Cut(10)):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    changes += stream.tick(clock.now_ns + 5 * SECOND)
    assert changes[-1].kind != "closed"
    changes += stream.tick(clock.now_ns + 11 * SECOND)
    assert (changes[-1].kind, changes[-1].reason) == ("closed", "the job has ended")
    assert stream.n_rows == 0
    assert blamed(stream.report()) == blamed(report_of(trace))


def test_the_rows_of_a_silent_job_are_discarded():
    clock = Hand()
    stream = Stream(clock=clock, forget_ns=60 * SECOND)
    stream.feed(BUILT["healthy"])
    assert stream.n_rows
    stream.tick(61 * SECOND)
    assert stream.n_rows == 0


def test_a_stream_aligns_ranks_that_were_attached_late():
    job = SimulatedJob(dp=4, ranks_per_node=2, steps=120)
    fault = HostStall(cause="block_io", ranks=(3,), delay_ns=80 * MS, schedule=Schedule(first=60, every=5))
    trace, _ = simulate(
        job, (fault,), seed=2, capture=Capture(late_nodes=(1,), late_ns=1_200 * MS), has_twin=False
    )
    assert len(np.unique(trace.collectives["node"])) == 2
    same_in(trace, Cut(30, behind_ns={1: SECOND}, apart=True))


def rows_of(spec: list[tuple[int, int, int]]) -> layout.Array:
    """Collectives of two ranks: (pid, seq, ts in ms)."""
    rows = layout.empty(layout.COLLECTIVES, len(spec))
    for name, column in zip(("pid", "seq", "ts_ns"), zip(*spec, strict=True), strict=True):
        rows[name] = column
    rows["ts_ns"] *= MS
    rows["comm_hash"], rows["nranks"], rows["op"] = 7, 2, 1
    return rows[np.lexsort((rows["ts_ns"], rows["pid"]))]


def test_rows_are_complete_up_to_the_first_round_with_a_missing_member():
    rows = rows_of([(1, 0, 0), (1, 1, 10), (1, 2, 20), (1, 3, 30), (2, 0, 1), (2, 1, 11)])
    assert complete(rows, SECOND).tolist() == [True, True, False, False, True, True]


def test_a_lagging_member_delays_rows_only_up_to_the_limit():
    rows = rows_of([(1, 0, 0), (1, 1, 10), (1, 2, 2_000), (1, 3, 4_000), (2, 0, 1)])
    assert complete(rows, SECOND).tolist() == [True, True, True, False, True]


def test_a_member_without_any_rows_delays_the_other_members():
    rows = rows_of([(1, 0, 0), (1, 1, 10)])
    assert not complete(rows, SECOND).any()
    rows = rows_of([(1, 0, 0), (1, 1, 1_500)])
    assert complete(rows, SECOND).all()


def test_delays_of_two_stretches_add_up_to_those_of_both():
    case = case_of(dp_trace(every(2, 5, 50 * MS, category=Category.IO)), Thresholds(), None)
    late = findings(case).named[2]
    whole = delays_by_process(case, late)[2]
    parts = [delays_by_process(case, part, among=late)[2] for part in (late[:3], late[3:])]
    both = total(parts)
    assert both.n_late == whole.n_late == len(late)
    assert both.n_incidents == whole.n_incidents
    assert both.rounds == whole.rounds
    assert (both.since_ns, both.until_ns) == (whole.since_ns, whole.until_ns)
    assert both.lost_ns == pytest.approx(whole.lost_ns)
    assert both.excess.ledger_ns == pytest.approx(whole.excess.ledger_ns)
    assert both.excess.total_ns == pytest.approx(whole.excess.total_ns)


@pytest.mark.parametrize(("steps", "wanted"), [([3], 20), ([3, 4, 5], 20), ([0, 14, 28, 42], 56)])
def test_a_rank_is_over_it_after_several_times_the_usual_distance_of_its_delays(steps, wanted):
    assert quiet_steps(np.array(steps)) == wanted


def uncertain(*suspects: int) -> Candidate:
    """Late steps of these ranks that may be chance."""
    verdict = Verdict(kind="inconclusive", summary="coincidence?", confidence=0.5)
    verdict = replace(verdict, evidence=replace(verdict.evidence, suspects=list(suspects)))
    return Candidate(UNCERTAIN, frozenset(), verdict, -1, 64)


def candidate_on(
    rank: int, kind: str = "straggler", *, sort: str = "rank", quiet_steps: int = 64
) -> Candidate:
    """A verdict on a rank."""
    verdict = Verdict(kind=kind, summary=f"rank {rank}", confidence=0.9, ranks=[rank])
    return Candidate(sort, frozenset({(0, rank)}), verdict, 20, quiet_steps)


def test_a_verdict_replaces_the_uncertain_steps_that_it_explains():
    incidents = Incidents()
    (opened,) = incidents.open_or_update([uncertain(5)], 10, 1, job="j")
    named, other = incidents.open_or_update([candidate_on(5), candidate_on(7)], 20, 2, job="j")
    assert (opened.kind, named.kind, other.kind) == ("opened", "updated", "opened")
    assert named.incident_id == opened.incident_id != other.incident_id
    assert [incident.candidate.verdict.kind for incident in incidents.open] == ["straggler"] * 2


@pytest.mark.parametrize(
    "candidate",
    [
        candidate_on(7),
        candidate_on(7, "hang", sort="hang", quiet_steps=0),
        candidate_on(3, "hang", sort="hang", quiet_steps=0),
        candidate_on(3, "failure", sort="failed", quiet_steps=0),
        candidate_on(3, "device", sort="failed", quiet_steps=0),
        candidate_on(3, "mismatch", sort="mismatch 1 2"),
    ],
    ids=lambda candidate: f"{candidate.verdict.kind} {candidate.verdict.ranks}",
)
def test_a_verdict_that_does_not_explain_uncertain_steps_opens_its_own_incident(candidate: Candidate):
    incidents = Incidents()
    (uncertain_one,) = incidents.open_or_update([uncertain(3)], 10, 1, job="j")
    (change,) = incidents.open_or_update([candidate], 20, 2, job="j")
    assert change.kind == "opened" and change.incident_id != uncertain_one.incident_id
    assert [incident.candidate.verdict.kind for incident in incidents.open] == [
        "inconclusive",
        candidate.verdict.kind,
    ]


def test_an_empty_batch_produces_no_changes():
    stream = Stream(clock=Hand())
    assert stream.feed(Trace()) == []
    assert stream.tick(0) == []
    assert stream.report().healthy
    assert stream.finish() == []


def test_batches_may_number_the_nodes_as_they_like():
    trace = BUILT["two nodes"]
    assert len({tuple(batch.nodes) for _, batch in batches(trace, Cut(2, apart=True))}) == 2
    assert UNKNOWN not in told(trace, Cut(8, apart=True)).report.verdicts[0].ranks


def test_an_incident_of_a_job_attached_late_stays_open_until_the_end():
    """Numbering the rounds again, as rows grow, neither closes nor reopens it."""
    fault = HostStall(
        cause="host_sleep", ranks=(2,), delay_ns=150 * MS, schedule=Schedule(first=0, every=7), spread=0.0
    )
    capture = Capture(late_nodes=(0,), late_ns=2_000 * MS)
    trace, _ = simulate(SimulatedJob(dp=4, steps=400), (fault,), seed=1, capture=capture, has_twin=False)
    stream = Stream(clock=(clock := Hand()))
    changes = []
    for clock.now_ns, batch in batches(trace, Cut(10)):
        changes += [*stream.feed(batch), *stream.tick()]
    assert [change.kind for change in changes if change.kind != "updated"] == ["opened"]
    assert changes[0].verdict.ranks == [2]
