"""Rounds that ranks entered with different calls: another operation, size or type."""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.arrays.row_order import flagged
from stallscope.diagnose.evidence_fields import RoundCall
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.columns import is_one_value
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag, Op, word

_CALL = ("op", "count", "datatype")


@dataclass(frozen=True)
class Mismatch:
    """A round that its ranks entered with different operations, sizes or types.

    odd: the processes that differ from the majority, or all processes without a majority. calls: the call of each.
    """

    comm: int
    seq: int
    odd: Array
    present: Array
    at_ns: int
    calls: tuple[RoundCall, ...]


def mismatches(
    timeline: Timeline, programs: Programs, matched: Rounds, *, arrival_ns: Array
) -> list[Mismatch]:
    """Rounds whose ranks disagree on operation, count or datatype. Ranks attached late are left out.

    Small groups may have no majority. Then the same call in the other groups of the program decides which rank differs.

    If many rounds of a communicator disagree, the round numbers are wrong rather than the program: none is reported.
    """
    rows = timeline.rows
    counted = ~timeline.is_p2p & (rows["seq"] != UNKNOWN)
    counted &= ~flagged(rows["flags"], CollectiveFlag.LATE_ATTACH)
    odd_rounds = _inconsistent_rounds(timeline, matched, counted)
    if not len(odd_rounds):
        return []
    call, _ = numbered(*(rows[name] for name in _CALL))
    out = []
    comm_of_round = timeline.comm_of_round
    n_odd = np.bincount(comm_of_round[odd_rounds], minlength=len(timeline.comm_hash))
    for number in odd_rounds.tolist():
        members = np.flatnonzero((matched.round == number) & counted)
        is_numbered_twice = len(np.unique(timeline.process[members])) < len(members)
        if n_odd[comm_of_round[number]] > 3 or is_numbered_twice:
            continue
        same_call = np.flatnonzero(np.isin(programs.key, programs.key[members]) & counted)
        out.append(_mismatch(timeline, members, call, same_call=same_call, arrival_ns=arrival_ns))
    return out


def _inconsistent_rounds(timeline: Timeline, matched: Rounds, counted: Array) -> Array:
    """The rounds in which the counted rows, bool (n,), are not all of the same call: int64, sorted."""
    is_odd = np.zeros(matched.n_rounds, bool)
    here = slice(None) if counted.all() else np.flatnonzero(counted)
    number = matched.round[here]
    for column in (timeline.rows[name] for name in _CALL):
        if is_one_value(column):
            continue
        value, of_round = column[here], np.zeros(matched.n_rounds, column.dtype)
        of_round[number] = value  # the last assignment wins
        is_odd[number[value != of_round[number]]] = True
    return np.flatnonzero(is_odd)


def _mismatch(
    timeline: Timeline, members: Array, call: Array, *, same_call: Array, arrival_ns: Array
) -> Mismatch:
    """members: rows of the round. call: by row, the call's number. same_call: rows of this call in all groups."""
    values, counts = np.unique(call[same_call], return_counts=True)
    majority = values[np.argmax(counts)]
    differs = members[call[members] != majority]
    odd = differs if counts.max() * 2 > len(same_call) and len(differs) else members
    rows = timeline.rows[members]
    return Mismatch(
        comm=int(timeline.comm[members[0]]),
        seq=int(rows["seq"][0]),
        odd=timeline.process[odd],
        present=timeline.process[members],
        at_ns=int(arrival_ns[members].max()),
        calls=tuple(
            RoundCall(
                rank=int(timeline.rank[timeline.process[row]]),
                op=word(Op, int(timeline.rows["op"][row])),
                count=int(timeline.rows["count"][row]),
                datatype=int(timeline.rows["datatype"][row]),
            )
            for row in members.tolist()
        ),
    )
