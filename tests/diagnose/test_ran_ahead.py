"""Ranks that finished all calls are not the culprits where at most half of the ranks made a call too many."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report import text
from stallscope.events import layout
from stallscope.events.layout import HOST_EVENTS, UNKNOWN
from stallscope.events.names import Category, CollectiveFlag, HostKind, Op
from stallscope.events.trace import Trace

from .builders import MS, Gone, dp_trace
from .reports import only, report_of

ROUNDS = 20


def dumps(entered: dict[int, int], *, completed: dict[int, int], n_ranks: int) -> Trace:
    """Dumps of some ranks of one communicator: how many rounds each has entered and completed."""
    processes, communicators = (
        layout.empty(layout.PROCESSES, n_ranks),
        layout.empty(layout.COMMUNICATORS, n_ranks),
    )
    for table in (processes, communicators):
        table["pid"], table["nranks"] = np.arange(n_ranks) + 1, n_ranks
    processes["rank"] = communicators["comm_rank"] = np.arange(n_ranks)
    communicators["comm_hash"] = 7
    rows = [(rank, seq) for rank, n in entered.items() for seq in range(max(n - 5, 0), n)]
    collectives = layout.empty(layout.COLLECTIVES, len(rows))
    for i, (rank, seq) in enumerate(rows):
        is_open = seq >= completed[rank]
        collectives["flags"][i] = CollectiveFlag.NO_LEDGER | (CollectiveFlag.OPEN if is_open else 0)
        collectives["pid"][i], collectives["comm_rank"][i], collectives["seq"][i] = rank + 1, rank, seq
        collectives["ts_ns"][i] = 1_000_000 * MS + seq * 10 * MS
    collectives["comm_hash"], collectives["nranks"], collectives["op"] = 7, n_ranks, Op.ALL_REDUCE
    snapshots = layout.empty(layout.SNAPSHOTS, len(entered))
    snapshots["pid"] = [rank + 1 for rank in entered]
    snapshots["alive"] = 1
    for rank, n in entered.items():
        communicators["last_entered"][rank], communicators["last_completed"][rank] = (
            n - 1,
            completed[rank] - 1,
        )
    silent = [rank for rank in range(n_ranks) if rank not in entered]
    communicators["last_entered"][silent] = communicators["last_completed"][silent] = UNKNOWN
    return Trace(
        collectives=collectives,
        processes=processes,
        communicators=communicators,
        snapshots=snapshots,
        source="dumps made by hand",
    )


@pytest.mark.parametrize(
    ("n_ranks", "ahead"), [(4, (0,)), (8, (5,)), (8, (2, 6)), (3, (1,)), (4, (1, 2)), (8, (0, 1, 2, 3))]
)
def test_no_rank_of_at_least_half_that_completed_all_calls_is_named(n_ranks, ahead):
    entered = {rank: ROUNDS + (rank in ahead) for rank in range(n_ranks)}
    verdict = only(
        report_of(dumps(entered, completed=dict.fromkeys(range(n_ranks), ROUNDS), n_ranks=n_ranks))
    )
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert verdict.evidence.ahead == list(ahead)
    assert verdict.first_round == ROUNDS


@pytest.mark.parametrize(("n_ranks", "behind"), [(4, (3,)), (8, (0, 1)), (2, (1,))])
def test_a_minority_that_is_behind_is_named(n_ranks, behind):
    entered = {rank: ROUNDS + (rank not in behind) for rank in range(n_ranks)}
    verdict = only(
        report_of(dumps(entered, completed=dict.fromkeys(range(n_ranks), ROUNDS), n_ranks=n_ranks))
    )
    assert (verdict.kind, verdict.ranks) == ("hang", list(behind))


def test_a_rank_without_a_dump_has_not_ended():
    entered = dict.fromkeys((0, 1), ROUNDS + 1)
    report = report_of(dumps(entered, completed=dict.fromkeys(entered, ROUNDS), n_ranks=4))
    assert "has ended" not in text.report(report)
    assert "left no dump" in only(report).summary


def test_all_ranks_that_entered_a_round_are_suspects_and_none_is_named():
    entered = dict.fromkeys(range(4), ROUNDS + 1)
    verdict = only(report_of(dumps(entered, completed=dict.fromkeys(entered, ROUNDS), n_ranks=4)))
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])


@pytest.mark.parametrize("ended", [(0, 1, 3), (0, 3)])
@pytest.mark.parametrize(("status", "is_named"), [(0, False), (1, True)])
def test_live_ranks_that_ended_well_are_not_named_when_others_go_on(ended, status, is_named):
    gone = tuple(Gone(rank, 30, category=Category.NONE) for rank in ended)
    trace = dp_trace(gone=gone, quiet_ns=60_000 * MS)
    exits = layout.empty(HOST_EVENTS, len(ended))
    exits["pid"], exits["kind"], exits["value"] = [1000 + rank for rank in ended], HostKind.EXIT, status
    exits["ts_ns"] = trace.processes["ended_ns"][[*ended]]
    verdicts = [v for v in report_of(replace(trace, host_events=exits)).verdicts if v.kind == "hang"]
    assert [v.ranks for v in verdicts] == [[*ended] if is_named else []]
