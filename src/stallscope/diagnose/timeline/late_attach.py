"""Rounds of ranks attached late: their count of rounds does not start at the communicator's creation.

Such a rank's calls are matched to another rank's calls by operation, count and data type, and by their rhythm: the
correct shift is the shift at which the arrivals of the two ranks stay closest together. Hosts that run ahead, or that
one host delays by most of a step, may be far apart. But no host is released from a wait before the others have entered
the same round, and all hosts are released together; on one node's clock, this decides. On two clocks, the difference of
the releases varies least at the correct shift. The arrivals alone would mislead there: the other ranks enter the next
step at the moment at which a late rank enters this step.

A communicator that is older than the capture has no known identity. Its members are found in the same way. Both results
are estimates, which work well for jobs that synchronise. The rows keep their LATE_ATTACH flag, which lowers the
confidence of verdicts.

A restarted agent counts from 0 again, and knows its processes' communicators by their addresses only. Earlier records
map the addresses to identities. Without such records, calls at the same addresses continue the earlier communicator.
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

_ENDS_TOGETHER_NS = 100_000  # a collective ends on all ranks within this time
_FEWEST_RELEASES = 5  # releases that each wrong shift must contradict before a shift is confirmed
_REACH = 128  # shifts tried around the shift at which both captures contain the last round
_COMPARED = 512  # arrivals compared
_MAX_ROUNDS = 1 << 20  # numbers of rounds of a communicator in one comparison: a damaged number may be any
_SAME_CALLS = 0.9
_WAITS_DIFFER = 0.2  # share of the waits that may be after different calls of the program
_MAY_DIFFER = 1  # calls: a rank may make one wrong call; a shift by a call makes at least two calls differ
_RESTART_NS = 100_000_000  # an agent takes longer to start; records of threads are reordered within far less
_WALL_WEIGHT = 0.1  # of a wall clock difference relative to a spread: decides between equal rhythms
_CLOSE = 0.5  # spread of the differences, as a share of the median gap between steps, for ranks of one communicator


_NEEDED = (
    *("node", "ts_ns", "comm_hash", "comm_handle", "comm_rank", "nranks"),
    *("seq", "op", "datatype", "count", "peer_rank", "wait_leave_ns"),
)


@dataclass(frozen=True, eq=False)  # arrays: compare by identity
class _Unit:
    """The calls of one process on one communicator.

    call: int64, equal for equal calls. released_ns: the release after each call, UNKNOWN if it is not recorded or the
    call does not synchronise. waits: bool, whether the process waited between the call and its next call. ends_ns: the
    ends of the calls on the GPU, on the host's clock; None unless all ends are recorded.
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


def is_counted_late(flags: Array) -> Array:
    """Whether a round number counts from the attach instead of the communicator's creation: bool (n,)."""
    return flagged(flags, CollectiveFlag.LATE_ATTACH, without=CollectiveFlag.NUMBERED)


def renumbered(table: RowsInOrder, process: Array, clocks: tuple[Clock, ...]) -> dict[str, Array]:
    """The corrected columns seq, comm_hash, comm_rank and nranks, if any rank was attached late; otherwise no columns.

    table: COLLECTIVES (n,), sorted by process, then time. process: int64 (n,). clocks: wall-clock readings, which
    align the nodes' clocks to some milliseconds.
    """
    is_late = is_counted_late(table["flags"])
    if not is_late.any():
        return {}
    rows = np.empty(len(table), [(name, table.table.dtype[name]) for name in _NEEDED])
    for name in _NEEDED:
        rows[name] = table[name]
    call, _ = numbered(rows["op"], rows["count"], rows["datatype"])
    is_p2p = np.isin(rows["op"], (Op.SEND, Op.RECV))
    _name_by_address(rows, process)
    unknown = rows["comm_hash"] == 0
    own = np.where(unknown, rows["comm_handle"], rows["comm_hash"])
    numbering, _ = numbered(
        process, own, is_late, np.where(is_p2p, rows["op"], 0), np.where(is_p2p, rows["peer_rank"], 0)
    )
    unit_of, _ = numbered(numbering, _n_restarts(rows, numbering, is_late))
    first = np.append(np.flatnonzero(np.diff(process, prepend=-1)), len(process))
    leaves_ns, is_last = released(rows["ts_ns"], rows["wait_leave_ns"], first)
    is_synchronising = np.isin(rows["op"], list(SYNCHRONISING_OPS))
    leaves_ns[~is_synchronising] = UNKNOWN
    ends_ns = ends_on_host_clock(rows["ts_ns"], table["gpu_start_ns"], table["gpu_end_ns"])
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
    between = _KnownOffsets({clock.node: clock.monotonic_ns - clock.wall_ns for clock in clocks}, {})
    known = _number_known(
        rows, [unit for unit in units if not unknown[unit.rows[0]]], is_p2p, between=between
    )
    unnamed = [unit for unit in units if unknown[unit.rows[0]] and not is_p2p[unit.rows[0]]]
    _find_unknown(rows, _complete(rows, known, unnamed, between=between), between=between)
    return {name: rows[name].copy() for name in ("seq", "comm_hash", "comm_rank", "nranks")}


def _n_restarts(rows: Array, numbering: Array, is_late: Array) -> Array:
    """The number of agent restarts before each row that the round numbers show: int64 (n,).

    numbering: int64 (n,), equal for rows that are numbered together.
    """
    order = np.argsort(numbering, kind="stable")
    ordered, seq, ts_ns = numbering[order], rows["seq"][order], rows["ts_ns"][order]
    is_back = (np.diff(ordered) == 0) & (np.diff(seq) < 0) & (np.diff(ts_ns) > _RESTART_NS)
    n_restarts = np.zeros(len(rows), np.int64)
    n_restarts[order[1:]] = np.cumsum(is_back & is_late[order[1:]])
    return n_restarts


def _name_by_address(rows: Array, process: Array) -> None:
    """Fill in the identity of communicators that the same process used at the same address with a known identity."""
    numbering, n = numbered(process, rows["comm_handle"])
    known = np.flatnonzero((rows["comm_hash"] != 0) & (rows["comm_handle"] != 0))
    example = np.full(n, UNKNOWN)
    example[numbering[known]] = known
    unnamed = np.flatnonzero((rows["comm_hash"] == 0) & (example[numbering] != UNKNOWN))
    named = rows[example[numbering[unnamed]]]
    rows["comm_hash"][unnamed] = named["comm_hash"]
    for name in ("comm_rank", "nranks"):
        current = rows[name][unnamed]
        rows[name][unnamed] = np.where(current == UNKNOWN, named[name], current)


@dataclass(frozen=True)
class _KnownOffsets:
    """The known offsets between nodes' clocks: monotonic minus wall time by node, and offsets from the job by pair of
    nodes (added to the first node's times, they give the second node's times).
    """

    wall_ns: dict[int, int]
    by_job_ns: dict[tuple[int, int], float]

    def by_job(self, first: int, second: int) -> float | None:
        if first == second:
            return 0.0
        there, back = self.by_job_ns.get((first, second)), self.by_job_ns.get((second, first))
        return there if there is not None else None if back is None else -back

    def may_overlap(self, first: _Unit, second: _Unit) -> bool:
        """Whether two units have calls at the same time, within the accuracy of the clocks."""
        apart = 0.0 if first.node == second.node else self.by_wall(first.node, second.node)
        has_ends = first.ends_ns is not None and second.ends_ns is not None
        if apart is None or (has_ends and first.node != second.node):
            return True
        begins, ends = first.ts_ns[[0, -1]] + apart
        return bool(begins <= second.ts_ns[-1] and second.ts_ns[0] <= ends)

    def by_wall(self, first: int, second: int) -> float | None:
        if first not in self.wall_ns or second not in self.wall_ns:
            return None
        return float(self.wall_ns[second] - self.wall_ns[first])


def _members(group: Array) -> list[Array]:
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


def _number_known(
    rows: Array, units: list[_Unit], is_p2p: Array, *, between: _KnownOffsets
) -> list[list[_Unit]]:
    """Shift the round numbers of late ranks to the numbers of the rank with the longest record from the start.

    Returns the members of each communicator, without pairs that send to each other.
    """
    groups: dict[tuple[int, int, int], list[_Unit]] = {}
    for unit in units:
        first = rows[unit.rows[0]]
        source, destination = UNKNOWN, UNKNOWN
        if is_p2p[unit.rows[0]]:
            ends = int(first["comm_rank"]), int(first["peer_rank"])
            source, destination = ends if first["op"] == Op.SEND else ends[::-1]
        groups.setdefault((int(first["comm_hash"]), source, destination), []).append(unit)
    whole = []
    for key, members in sorted(groups.items(), key=lambda item: -sum(len(unit.rows) for unit in item[1])):
        if any(unit.is_late for unit in members):
            members = _number_group(rows, members, between=between)
        if key[1:] == (UNKNOWN, UNKNOWN):
            whole.append(members)
    return whole


def _number_group(rows: Array, members: list[_Unit], *, between: _KnownOffsets) -> list[_Unit]:
    """Number the late members of one communicator, each by a concurrent member, preferably on its own node.

    Without a concurrent member, the numbers continue after the rounds numbered before, with a gap for missed rounds.
    """
    done: list[_Unit] = []
    for unit in sorted(members, key=lambda member: (member.is_late, -len(member.rows))):
        concurrent = [
            other for other in done if other.process != unit.process and between.may_overlap(other, unit)
        ]
        on_node = (other for other in concurrent if other.node == unit.node)
        reference = next(on_node, concurrent[0] if concurrent else None)
        shift = 0
        if reference is None and unit.is_late and done:
            shift = max(int(other.seq.max()) for other in done) + 2 - int(unit.seq.min())
        if reference is not None:
            fixed = 0 if not unit.is_late else None
            shift, _ = _best_shift(reference, unit, between=between, fixed=fixed)
        rows["seq"][unit.rows] += shift
        done.append(replace(unit, seq=unit.seq + shift))
    return done


def _complete(
    rows: Array, known: list[list[_Unit]], unnamed: list[_Unit], *, between: _KnownOffsets
) -> list[_Unit]:
    """Fill communicators that lack members with the units of unknown identity in their rhythm; returns the other units.

    The members of a node whose agent attached late lack in the records of the other nodes. Units that are fewer or
    more than the missing members stay apart.
    """
    for members in known:
        reference = max(members, key=lambda unit: len(unit.rows))
        n_lacking = int(rows["nranks"][reference.rows[0]]) - len({unit.process for unit in members})
        if n_lacking <= 0 or not unnamed:
            continue
        present = {unit.process for unit in members}
        shifts = {}
        for unit in unnamed:
            if unit.process not in present and between.may_overlap(unit, reference):
                shift, spread = _best_shift(reference, unit, between=between)
                if spread <= _CLOSE * _step_ns(reference):
                    shifts[unit.process] = unit, shift
        if len(shifts) != n_lacking:
            continue
        for unit, shift in shifts.values():
            rows["comm_hash"][unit.rows] = rows["comm_hash"][reference.rows[0]]
            rows["nranks"][unit.rows] = rows["nranks"][reference.rows[0]]
            rows["seq"][unit.rows] += shift
        joined = {id(unit) for unit, _ in shifts.values()}
        unnamed = [unit for unit in unnamed if id(unit) not in joined]
    return unnamed


def _find_unknown(rows: Array, units: list[_Unit], *, between: _KnownOffsets) -> None:
    """Give communicators of unknown identity an identity, shared by the ranks that call in the same rhythm.

    Calls of the same processes at the same addresses after a restart of the agent continue with a gap.
    """
    left = sorted(units, key=lambda unit: -len(unit.rows))
    groups: list[list[_Unit]] = []
    while left:
        first, left = left[0], left[1:]
        comm_hash = np.uint64(mixed(mixed(1, int(rows["comm_handle"][first.rows[0]])), first.process))
        rows["comm_hash"][first.rows] = comm_hash
        together, typical_gap = [first], _step_ns(first)
        for unit in list(left):
            if unit.process in {member.process for member in together} or not between.may_overlap(
                unit, first
            ):
                continue
            reference = next((member for member in together if member.node == unit.node), first)
            shift, spread = _best_shift(reference, unit, between=between)
            if spread > _CLOSE * typical_gap and not _is_confirmed(reference, unit, shift, typical_gap):
                continue
            rows["comm_hash"][unit.rows] = comm_hash
            rows["seq"][unit.rows] += shift
            together.append(replace(unit, seq=unit.seq + shift))
            left.remove(unit)
        members = np.concatenate([member.rows for member in together])
        sized = rows["nranks"][members]
        rows["nranks"][members] = np.where(sized == UNKNOWN, len(together), sized)
        groups.append(together)
    _continue_after_restart(rows, groups)


def _is_confirmed(reference: _Unit, unit: _Unit, shift: int, typical_gap_ns: float) -> bool:
    """Whether releases confirm a shift between two units of a node, even if one unit is always later than the other.

    Hosts that run ahead may be a step apart throughout. At the correct shift no unit is ever released before the other
    unit has entered; at every wrong shift a unit is. At the correct shift the distance hardly varies.
    """
    if reference.node != unit.node:
        return False
    candidates = _possible(reference, unit, fixed=None)
    here = next((pair for pair in candidates if pair.shift == shift), None)
    if here is None or any(
        pair.n_too_early(reference, unit) < _FEWEST_RELEASES
        for pair in candidates
        if pair.shift != shift and len(pair.of_unit) >= _SAME_CALLS * len(here.of_unit)
    ):
        return False
    difference = (unit.ts_ns[here.of_unit] - reference.ts_ns[here.of_reference]).astype(np.float64)
    scatter = float(np.median(np.abs(difference - np.median(difference))))
    return not here.n_too_early(reference, unit) and scatter <= _CLOSE * typical_gap_ns


def _continue_after_restart(rows: Array, groups: list[list[_Unit]]) -> None:
    """Join successive groups into one communicator if the same processes call at the same addresses."""
    newest: dict[tuple[int, int], Array] = {}
    for group in sorted(groups, key=lambda units: min(int(unit.ts_ns[0]) for unit in units)):
        members = np.concatenate([unit.rows for unit in group])
        keys = [(unit.process, int(rows["comm_handle"][unit.rows[0]])) for unit in group]
        before = next((newest[key] for key in keys if key in newest), None)
        if before is not None:
            rows["comm_hash"][members] = rows["comm_hash"][before[0]]
            rows["seq"][members] += int(rows["seq"][before].max()) + 2 - int(rows["seq"][members].min())
        newest |= dict.fromkeys(keys, members)


def _step_ns(unit: _Unit) -> float:
    """The typical gap between a process's steps: the 90th percentile of the gaps between its calls."""
    gaps = np.diff(unit.ts_ns)
    return float(np.quantile(gaps, 0.9)) if len(gaps) else 0.0


def _best_shift(
    reference: _Unit, unit: _Unit, *, between: _KnownOffsets, fixed: int | None = None
) -> tuple[int, float]:
    """The shift of a unit's round numbers to the reference's numbers, and the distance (ns) of the arrivals then.

    If the offset of the two clocks is known, the distance is the median difference of the arrivals. Otherwise it is the
    spread of the differences. If both were released from enough waits at known times, it is the spread of the releases.
    Wall clocks, accurate to some milliseconds, then decide between shifts of equal rhythm,
    and the shift determines the offset. fixed: the known shift, if only the offset is unknown. The distance is infinite
    if no shift makes the calls equal.
    """
    candidates = _possible(reference, unit, fixed=fixed)
    if not candidates:
        return int(reference.seq.max()) - int(unit.seq.max()) if fixed is None else fixed, np.inf
    if reference.ends_ns is not None and unit.ends_ns is not None:
        return _by_ends(reference, unit, candidates, between=between)
    known, by_wall = between.by_job(reference.node, unit.node), between.by_wall(reference.node, unit.node)
    if reference.node == unit.node:
        candidates = _least(candidates, lambda pair: pair.n_too_early(reference, unit))
        if all(pair.n_released(reference, unit) >= _FEWEST_RELEASES for pair in candidates):
            apart_ns = [pair.releases_apart_ns(reference, unit) for pair in candidates]
            return candidates[int(np.argmin(apart_ns))].shift, min(apart_ns)
    # Ranks of one program wait after the same calls.
    n_waits = min(int(np.count_nonzero(unit.waits)), int(np.count_nonzero(reference.waits)))
    candidates = _least(
        candidates, lambda pair: pair.n_waits_differ(reference, unit), within=int(_WAITS_DIFFER * n_waits)
    )
    is_released = all(pair.n_released(reference, unit) >= _FEWEST_RELEASES for pair in candidates)
    if is_released:
        candidates = _least(
            candidates, lambda pair: pair.release_spread_ns(reference, unit), within=_ENDS_TOGETHER_NS
        )
    best, best_distance, offset = candidates[0], np.inf, 0.0
    for pair in _least(candidates, lambda pair: pair.n_differ, within=_MAY_DIFFER):
        difference = (unit.ts_ns[pair.of_unit] - reference.ts_ns[pair.of_reference]).astype(np.float64)
        middle = float(np.median(difference))
        if known is not None:
            distance = float(np.median(np.abs(difference - known)))
        else:
            distance = float(np.median(np.abs(difference - middle)))
            distance += 0.0 if by_wall is None else _WALL_WEIGHT * abs(middle - by_wall)
        if distance < best_distance:
            best, best_distance, offset = pair, distance, middle
    if known is None:
        between.by_job_ns[reference.node, unit.node] = offset
    return best.shift, best.release_spread_ns(reference, unit) if is_released else best_distance


def _by_ends(
    reference: _Unit, unit: _Unit, candidates: list["_Pairing"], *, between: _KnownOffsets
) -> tuple[int, float]:
    """As _best_shift, for calls with known ends on the GPU: a collective ends on all ranks at the same time.

    Several shifts may have equal spreads, as in a job of equal steps. Then the shift with the most common calls wins;
    among equals, the shift at which the clocks are closest.
    """
    assert reference.ends_ns is not None and unit.ends_ns is not None
    known, by_wall = between.by_job(reference.node, unit.node), between.by_wall(reference.node, unit.node)
    spreads, offsets = [], []
    for pair in candidates:
        difference = (unit.ends_ns[pair.of_unit] - reference.ends_ns[pair.of_reference]).astype(np.float64)
        middle = float(np.median(difference)) if known is None else known
        offsets.append(middle)
        spreads.append(float(np.median(np.abs(difference - middle))))
    least = min(spreads) + _ENDS_TOGETHER_NS
    near = [i for i, spread in enumerate(spreads) if spread <= least]
    best = max(near, key=lambda i: (len(candidates[i].of_unit), -abs(offsets[i] - (by_wall or 0.0))))
    if known is None:
        between.by_job_ns[reference.node, unit.node] = offsets[best]
    return candidates[best].shift, spreads[best]


@dataclass(frozen=True, eq=False)
class _Pairing:
    """Calls of a unit and of its reference in the same round after a shift of the unit's numbers.

    of_unit, of_reference: int64 (k,), indices in the unit and in the reference. n_differ: the number of unequal calls.
    """

    shift: int
    of_unit: Array
    of_reference: Array
    n_differ: int

    def n_waits_differ(self, reference: _Unit, unit: _Unit) -> int:
        """How often only one of the two waited after the call."""
        return int(np.count_nonzero(reference.waits[self.of_reference] != unit.waits[self.of_unit]))

    def _releases(self, reference: _Unit, unit: _Unit) -> Array:
        """The releases of both after the rounds for which both are known: int64 (2, k)."""
        leaves = np.stack([reference.released_ns[self.of_reference], unit.released_ns[self.of_unit]])
        return leaves[:, (leaves != UNKNOWN).all(axis=0)]

    def n_released(self, reference: _Unit, unit: _Unit) -> int:
        """The number of rounds after which both were released at a known time."""
        return self._releases(reference, unit).shape[1]

    def releases_apart_ns(self, reference: _Unit, unit: _Unit) -> float:
        """The mean difference of the releases; both must be on one clock."""
        return float(np.abs(np.diff(self._releases(reference, unit), axis=0)).mean())

    def release_spread_ns(self, reference: _Unit, unit: _Unit) -> float:
        """How much the difference of the releases varies: the median distance from its median, on any clocks."""
        apart = np.diff(self._releases(reference, unit), axis=0)[0].astype(np.float64)
        return float(np.median(np.abs(apart - np.median(apart))))

    def n_too_early(self, reference: _Unit, unit: _Unit) -> int:
        """How often a unit was released before the other had entered; both must be on one clock."""
        arrived = reference.ts_ns[self.of_reference], unit.ts_ns[self.of_unit]
        leaves = reference.released_ns[self.of_reference], unit.released_ns[self.of_unit]
        return sum(
            int(np.count_nonzero((leave != UNKNOWN) & (arrival > leave)))
            for arrival, leave in zip(arrived, leaves[::-1], strict=True)
        )


def _possible(reference: _Unit, unit: _Unit, *, fixed: int | None) -> list[_Pairing]:
    """The shifts at which nearly all calls are equal, near the shift at which both records end with the same round."""
    newest = int(reference.seq.max())
    recent = np.flatnonzero(reference.seq > newest - _MAX_ROUNDS)
    first = int(reference.seq[recent].min())
    at = np.full(newest - first + 1, -1)
    at[reference.seq[recent] - first] = recent
    compared = np.arange(len(unit.seq))[-_COMPARED:]
    seq, call = unit.seq[compared], unit.call[compared]
    guess = newest - int(unit.seq.max())
    candidates = []
    for shift in range(guess - _REACH, guess + _REACH + 1) if fixed is None else (fixed,):
        index = seq + shift - first
        inside = (index >= 0) & (index < len(at))
        of_reference = at[index[inside]]
        is_common = of_reference >= 0
        if is_common.sum() < max(min(len(seq), 8), 0.5 * min(len(seq), len(at))):
            continue
        of_reference, of_unit = of_reference[is_common], np.flatnonzero(inside)[is_common]
        n_differ = int(np.count_nonzero(reference.call[of_reference] != call[of_unit]))
        if n_differ <= (1 - _SAME_CALLS) * len(of_unit):
            candidates.append(_Pairing(shift, compared[of_unit], of_reference, n_differ))
    return candidates


def _least(
    candidates: list[_Pairing], count: Callable[[_Pairing], float], *, within: int = 0
) -> list[_Pairing]:
    """The candidates with the smallest count, or with a count within that minimum plus `within`."""
    counts = [count(pair) for pair in candidates]
    return [pair for pair, n in zip(candidates, counts, strict=True) if n <= min(counts) + within]
