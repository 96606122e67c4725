"""Rounds of ranks whose capture began late: their count of rounds does not start at the communicator's creation.

Such a rank's calls are matched to another rank's by what they are (operation, count, data type) and by their
rhythm: the right shift is the one at which the two ranks' arrivals stay closest together. Hosts that run ahead may be
far apart; but none is released from a wait before the others have entered what it waits for: on one node's clock, few
shifts allow for that. A communicator that is
older than the capture has no known identity; there the members are found the same way. Both are guesses, made
well by jobs that synchronise; the rows keep their LATE_ATTACH flag, which lowers the confidence of verdicts.

An agent that is started anew counts anew, and knows its processes' communicators by their addresses only: those the
records from before tell; where there are none, what is called at the same addresses goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.arrays.row_order import RowsInOrder, flagged
from stallscope.diagnose.timeline.releases import ends_on_host_clock, released
from stallscope.events.identity import mixed
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS, CollectiveFlag, Op
from stallscope.events.trace import Clock

_ENDS_TOGETHER_NS = 100_000  # a collective ends on all ranks within less
_FEWEST_RELEASES = 5  # that a wrong shift must contradict, before the right one is believed
_REACH = 128  # shifts tried around "both captures saw the last round"
_COMPARED = 512  # arrivals compared
_SAME_CALLS = 0.9
_WAITS_DIFFER = 0.2  # share of the waits that a rank may make elsewhere in its program
_MAY_DIFFER = 1  # calls: one of a rank may be a wrong one; shifted by a call at least two differ
_RESTART_NS = 100_000_000  # an agent needs longer to start; threads change places within far less
_WALL_WEIGHT = 0.1  # of a difference by wall clocks beside a spread: decides between equal rhythms
_CLOSE = (
    0.5  # spread of the differences, as a share of the usual gap between steps, for ranks of one communicator
)


_NEEDED = (
    *("node", "ts_ns", "comm_hash", "comm_handle", "comm_rank", "nranks"),
    *("seq", "op", "datatype", "count", "peer_rank", "wait_leave_ns"),
)


@dataclass(frozen=True, eq=False)  # arrays: equal is what is the same
class _Unit:
    """The calls of one process on one communicator. call: int64, equal for equal calls. released_ns: when it was
    released from what it entered, UNKNOWN where that is not known or tells nothing of the others. waits: bool, whether
    the process waited after the call, before its next. ends_ns: when the
    calls ended on the GPU, on the host's clock; None where the source does not have that of all.
    """

    rows: Array
    process: int
    node: int
    is_late: bool
    seq: Array
    ts_ns: Array
    call: Array
    released_ns: Array
    waits: Array
    ends_ns: Array | None = None


def matched(whole: RowsInOrder, process: Array, clocks: tuple[Clock, ...]) -> dict[str, Array]:
    """The columns seq, comm_hash and nranks put right for ranks that were captured late; none where there are none.

    whole: COLLECTIVES (n,), sorted by process, then time. process: int64 (n,). clocks: wall-clock readings, which
    tell nodes' clocks apart to some milliseconds.
    """
    is_late = flagged(whole["flags"], CollectiveFlag.LATE_ATTACH)
    if not is_late.any():
        return {}
    rows = np.empty(len(whole), [(name, whole.table.dtype[name]) for name in _NEEDED])
    for name in _NEEDED:
        rows[name] = whole[name]
    call, _ = numbered(rows["op"], rows["count"], rows["datatype"])
    is_p2p = np.isin(rows["op"], (Op.SEND, Op.RECV))
    _name_by_address(rows, process)
    unknown = rows["comm_hash"] == 0
    own = np.where(unknown, rows["comm_handle"], rows["comm_hash"])
    place, _ = numbered(
        process, own, is_late, np.where(is_p2p, rows["op"], 0), np.where(is_p2p, rows["peer_rank"], 0)
    )
    unit_of, _ = numbered(place, _n_starts(rows, place, is_late))
    first = np.append(np.flatnonzero(np.diff(process, prepend=-1)), len(process))
    leaves_ns, is_last = released(rows["ts_ns"], rows["wait_leave_ns"], first)
    is_synchronising = np.isin(rows["op"], list(SYNCHRONISING_OPS))
    leaves_ns[~is_synchronising] = UNKNOWN
    ends_ns = ends_on_host_clock(rows["ts_ns"], whole["gpu_start_ns"], whole["gpu_end_ns"])
    has_end = np.zeros(len(rows), bool) if ends_ns is None else (ends_ns != UNKNOWN) & is_synchronising
    units = [
        _Unit(
            rows=where,
            process=int(process[where[0]]),
            node=int(rows["node"][where[0]]),
            is_late=bool(is_late[where].any()),
            seq=rows["seq"][where],
            ts_ns=rows["ts_ns"][where],
            call=call[where],
            released_ns=leaves_ns[where],
            waits=is_last[where],
            ends_ns=ends_ns[where] if ends_ns is not None and has_end[where].all() else None,
        )
        for where in _members(unit_of)
    ]
    between = _Between({clock.node: clock.monotonic_ns - clock.wall_ns for clock in clocks}, {})
    _number_known(rows, [unit for unit in units if not unknown[unit.rows[0]]], is_p2p, between=between)
    unnamed = [unit for unit in units if unknown[unit.rows[0]] and not is_p2p[unit.rows[0]]]
    _find_unknown(rows, unnamed, between=between)
    return {name: rows[name].copy() for name in ("seq", "comm_hash", "comm_rank", "nranks")}


def _n_starts(rows: Array, place: Array, is_late: Array) -> Array:
    """How often the agent had been started anew before each row, as far as its numbers show: int64 (n,).

    place: int64 (n,), equal for rows that are numbered together.
    """
    order = np.argsort(place, kind="stable")
    of_one, seq, ts_ns = place[order], rows["seq"][order], rows["ts_ns"][order]
    is_back = (np.diff(of_one) == 0) & (np.diff(seq) < 0) & (np.diff(ts_ns) > _RESTART_NS)
    n_starts = np.zeros(len(rows), np.int64)
    n_starts[order[1:]] = np.cumsum(is_back & is_late[order[1:]])
    return n_starts


def _name_by_address(rows: Array, process: Array) -> None:
    """Fill in the identity of communicators that the same process used at the same address under a known one."""
    place, n = numbered(process, rows["comm_handle"])
    known = np.flatnonzero((rows["comm_hash"] != 0) & (rows["comm_handle"] != 0))
    example = np.full(n, UNKNOWN)
    example[place[known]] = known
    found = np.flatnonzero((rows["comm_hash"] == 0) & (example[place] != UNKNOWN))
    told = rows[example[place[found]]]
    rows["comm_hash"][found] = told["comm_hash"]
    for name in ("comm_rank", "nranks"):
        now = rows[name][found]
        rows[name][found] = np.where(now == UNKNOWN, told[name], now)


@dataclass(frozen=True)
class _Between:
    """What is known of the nodes' clocks: monotonic minus wall time by node, and offsets found from the job by
    pair of nodes (what to add to the first one's times to get the second one's).
    """

    wall_ns: dict[int, int]
    found_ns: dict[tuple[int, int], float]

    def found(self, first: int, second: int) -> float | None:
        if first == second:
            return 0.0
        there, back = self.found_ns.get((first, second)), self.found_ns.get((second, first))
        return there if there is not None else None if back is None else -back

    def may_overlap(self, one: _Unit, other: _Unit) -> bool:
        """Whether two units have calls in the same time, as far as the clocks tell."""
        apart = 0.0 if one.node == other.node else self.by_wall(one.node, other.node)
        has_ends = one.ends_ns is not None and other.ends_ns is not None
        if apart is None or (has_ends and one.node != other.node):
            return True
        begins, ends = one.ts_ns[[0, -1]] + apart
        return bool(begins <= other.ts_ns[-1] and other.ts_ns[0] <= ends)

    def by_wall(self, first: int, second: int) -> float | None:
        if first not in self.wall_ns or second not in self.wall_ns:
            return None
        return float(self.wall_ns[second] - self.wall_ns[first])


def _members(group: Array) -> list[Array]:
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


def _number_known(rows: Array, units: list[_Unit], is_p2p: Array, *, between: _Between) -> None:
    """Shift the numbers of late ranks to those of a rank seen from the start, or of the one seen longest."""
    groups: dict[tuple[int, int, int], list[_Unit]] = {}
    for unit in units:
        first = rows[unit.rows[0]]
        source, destination = UNKNOWN, UNKNOWN
        if is_p2p[unit.rows[0]]:
            ends = int(first["comm_rank"]), int(first["peer_rank"])
            source, destination = ends if first["op"] == Op.SEND else ends[::-1]
        groups.setdefault((int(first["comm_hash"]), source, destination), []).append(unit)
    for members in sorted(groups.values(), key=lambda group: -sum(len(unit.rows) for unit in group)):
        if any(unit.is_late for unit in members):
            _number_group(rows, members, between=between)


def _number_group(rows: Array, members: list[_Unit], *, between: _Between) -> None:
    """Number one communicator's late members, each by another one of the same time, on its own node where there is one.

    Without such a one they follow what was numbered before, with a gap: something was missed.
    """
    done: list[_Unit] = []
    for unit in sorted(members, key=lambda one: (one.is_late, -len(one.rows))):
        beside = [one for one in done if one.process != unit.process and between.may_overlap(one, unit)]
        reference = next((one for one in beside if one.node == unit.node), beside[0] if beside else None)
        shift = 0
        if reference is None and unit.is_late and done:
            shift = max(int(one.seq.max()) for one in done) + 2 - int(unit.seq.min())
        if reference is not None:
            fixed = 0 if not unit.is_late else None
            shift, _ = _best_shift(reference, unit, between=between, fixed=fixed)
        rows["seq"][unit.rows] += shift
        done.append(replace(unit, seq=unit.seq + shift))


def _find_unknown(rows: Array, units: list[_Unit], *, between: _Between) -> None:
    """Give communicators of unknown identity one, shared by the ranks that call them in step.

    What the same processes call at the same addresses after the agent was started anew goes on with a gap.
    """
    left = sorted(units, key=lambda unit: -len(unit.rows))
    groups: list[list[_Unit]] = []
    while left:
        first, left = left[0], left[1:]
        comm_hash = np.uint64(mixed(mixed(1, int(rows["comm_handle"][first.rows[0]])), first.process))
        rows["comm_hash"][first.rows] = comm_hash
        together, usual_gap = [first], _step_ns(first)
        for unit in list(left):
            if unit.process in {one.process for one in together} or not between.may_overlap(unit, first):
                continue
            reference = next((one for one in together if one.node == unit.node), first)
            shift, spread = _best_shift(reference, unit, between=between)
            if spread > _CLOSE * usual_gap and not _is_confirmed(reference, unit, shift, usual_gap):
                continue
            rows["comm_hash"][unit.rows] = comm_hash
            rows["seq"][unit.rows] += shift
            together.append(replace(unit, seq=unit.seq + shift))
            left.remove(unit)
        members = np.concatenate([one.rows for one in together])
        sized = rows["nranks"][members]
        rows["nranks"][members] = np.where(sized == UNKNOWN, len(together), sized)
        groups.append(together)
    _go_on(rows, groups)


def _is_confirmed(reference: _Unit, unit: _Unit, shift: int, usual_gap_ns: float) -> bool:
    """Whether releases show that two units of a node meet at a shift, though one is always later than the other.

    Hosts that run ahead may be apart by a step throughout. At the right shift neither is ever released before the
    other has entered, at others each is; and the distance hardly changes.
    """
    if reference.node != unit.node:
        return False
    found = _possible(reference, unit, fixed=None)
    here = next((pair for pair in found if pair.shift == shift), None)
    if here is None or any(
        pair.n_too_early(reference, unit) < _FEWEST_RELEASES
        for pair in found
        if pair.shift != shift and len(pair.mine) >= _SAME_CALLS * len(here.mine)
    ):
        return False
    difference = (unit.ts_ns[here.mine] - reference.ts_ns[here.partner]).astype(np.float64)
    scatter = float(np.median(np.abs(difference - np.median(difference))))
    return not here.n_too_early(reference, unit) and scatter <= _CLOSE * usual_gap_ns


def _go_on(rows: Array, groups: list[list[_Unit]]) -> None:
    """Make one communicator of groups that are the same processes' calls at the same addresses, one after the other."""
    newest: dict[tuple[int, int], Array] = {}
    for group in sorted(groups, key=lambda one: min(int(unit.ts_ns[0]) for unit in one)):
        members = np.concatenate([unit.rows for unit in group])
        keys = [(unit.process, int(rows["comm_handle"][unit.rows[0]])) for unit in group]
        before = next((newest[key] for key in keys if key in newest), None)
        if before is not None:
            rows["comm_hash"][members] = rows["comm_hash"][before[0]]
            rows["seq"][members] += int(rows["seq"][before].max()) + 2 - int(rows["seq"][members].min())
        newest |= dict.fromkeys(keys, members)


def _step_ns(unit: _Unit) -> float:
    """The usual long gap between a process's calls: the 90th percentile, which is that between steps."""
    gaps = np.diff(unit.ts_ns)
    return float(np.quantile(gaps, 0.9)) if len(gaps) else 0.0


def _best_shift(
    reference: _Unit, unit: _Unit, *, between: _Between, fixed: int | None = None
) -> tuple[int, float]:
    """What to add to a unit's numbers to match the reference's, and how far apart (ns) the arrivals then are.

    Where the clocks of the two are known against each other, the distance is that of the arrivals. Else it is that
    of their rhythm, and wall clocks, good to some milliseconds, decide between shifts of equal rhythm; what is
    found then tells the clocks. fixed: the shift is known, only the clocks are not. The distance is infinite where
    no shift makes the calls the same.
    """
    found = _possible(reference, unit, fixed=fixed)
    if not found:
        return int(reference.seq.max()) - int(unit.seq.max()) if fixed is None else fixed, np.inf
    if reference.ends_ns is not None and unit.ends_ns is not None:
        return _by_ends(reference, unit, found, between=between)
    known, by_wall = between.found(reference.node, unit.node), between.by_wall(reference.node, unit.node)
    if reference.node == unit.node:
        found = _least(found, lambda pair: pair.n_too_early(reference, unit))
    # Ranks of one program wait after the same calls.
    n_waits = min(int(np.count_nonzero(unit.waits)), int(np.count_nonzero(reference.waits)))
    found = _least(
        found, lambda pair: pair.n_waits_differ(reference, unit), within=int(_WAITS_DIFFER * n_waits)
    )
    best, best_distance, offset = found[0].shift, np.inf, 0.0
    for pair in _least(found, lambda pair: pair.n_differ, within=_MAY_DIFFER):
        difference = (unit.ts_ns[pair.mine] - reference.ts_ns[pair.partner]).astype(np.float64)
        middle = float(np.median(difference))
        if known is not None:
            distance = float(np.median(np.abs(difference - known)))
        else:
            distance = float(np.median(np.abs(difference - middle)))
            distance += 0.0 if by_wall is None else _WALL_WEIGHT * abs(middle - by_wall)
        if distance < best_distance:
            best, best_distance, offset = pair.shift, distance, middle
    if known is None:
        between.found_ns[reference.node, unit.node] = offset
    return best, best_distance


def _by_ends(
    reference: _Unit, unit: _Unit, found: list["_Pairing"], *, between: _Between
) -> tuple[int, float]:
    """As _best_shift, of calls whose ends on the GPU are known: a collective ends on all ranks together.

    Of shifts at which the ends are equally far apart throughout, as in a job of equal steps, the one with the most
    calls in common counts; then the one that the clocks are closest at.
    """
    assert reference.ends_ns is not None and unit.ends_ns is not None
    known, by_wall = between.found(reference.node, unit.node), between.by_wall(reference.node, unit.node)
    spreads, offsets = [], []
    for pair in found:
        difference = (unit.ends_ns[pair.mine] - reference.ends_ns[pair.partner]).astype(np.float64)
        middle = float(np.median(difference)) if known is None else known
        offsets.append(middle)
        spreads.append(float(np.median(np.abs(difference - middle))))
    least = min(spreads) + _ENDS_TOGETHER_NS
    near = [i for i, spread in enumerate(spreads) if spread <= least]
    best = max(near, key=lambda i: (len(found[i].mine), -abs(offsets[i] - (by_wall or 0.0))))
    if known is None:
        between.found_ns[reference.node, unit.node] = offsets[best]
    return found[best].shift, spreads[best]


@dataclass(frozen=True, eq=False)
class _Pairing:
    """Calls of a unit and of its reference that are of one round if the unit's numbers are shifted by so much.

    mine, partner: int64 (k,), places in the unit and in the reference. n_differ: calls that are not the same.
    """

    shift: int
    mine: Array
    partner: Array
    n_differ: int

    def n_waits_differ(self, reference: _Unit, unit: _Unit) -> int:
        """How often one waited after the call and the other did not."""
        return int(np.count_nonzero(reference.waits[self.partner] != unit.waits[self.mine]))

    def n_too_early(self, reference: _Unit, unit: _Unit) -> int:
        """How often one was released before the other had entered: both on one clock."""
        arrived = reference.ts_ns[self.partner], unit.ts_ns[self.mine]
        leaves = reference.released_ns[self.partner], unit.released_ns[self.mine]
        return sum(
            int(np.count_nonzero((leave != UNKNOWN) & (arrival > leave)))
            for arrival, leave in zip(arrived, leaves[::-1], strict=True)
        )


def _possible(reference: _Unit, unit: _Unit, *, fixed: int | None) -> list[_Pairing]:
    """The shifts, near that at which both saw the last round, at which nearly all calls are the same."""
    first = int(reference.seq.min())
    at = np.full(int(reference.seq.max()) - first + 1, -1)
    at[reference.seq - first] = np.arange(len(reference.seq))
    compared = np.arange(len(unit.seq))[-_COMPARED:]
    seq, call = unit.seq[compared], unit.call[compared]
    guess = int(reference.seq.max()) - int(unit.seq.max())
    found = []
    for shift in range(guess - _REACH, guess + _REACH + 1) if fixed is None else (fixed,):
        place = seq + shift - first
        inside = (place >= 0) & (place < len(at))
        partner = at[place[inside]]
        seen = partner >= 0
        if seen.sum() < max(min(len(seq), 8), 0.5 * min(len(seq), len(at))):
            continue
        partner, mine = partner[seen], np.flatnonzero(inside)[seen]
        n_differ = int(np.count_nonzero(reference.call[partner] != call[mine]))
        if n_differ <= (1 - _SAME_CALLS) * len(mine):
            found.append(_Pairing(shift, compared[mine], partner, n_differ))
    return found


def _least(found: list[_Pairing], count: Callable[[_Pairing], int], *, within: int = 0) -> list[_Pairing]:
    """Those of which something is counted least, or within so many of that."""
    counts = [count(pair) for pair in found]
    return [pair for pair, n in zip(found, counts, strict=True) if n <= min(counts) + within]
