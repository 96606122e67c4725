"""Rounds of ranks whose capture began late: their count of rounds does not start at the communicator's creation.

Such a rank's calls are matched to another rank's by what they are (operation, count, data type) and by their
rhythm: the right shift is the one at which the two ranks' arrivals stay closest together. A communicator that is
older than the capture has no known identity; there the members are found the same way. Both are guesses, made
well by jobs that synchronise; the rows keep their LATE_ATTACH flag, which lowers the confidence of verdicts.

An agent that is started anew counts anew, and knows its processes' communicators by their addresses only: those the
records from before tell; where there are none, what is called at the same addresses goes on.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.groups import numbered
from stallscope.diagnose.in_order import RowsInOrder, flagged
from stallscope.events.identity import mixed
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag, Op
from stallscope.events.trace import Clock

_REACH = 128  # shifts tried around "both captures saw the last round"
_COMPARED = 512  # arrivals compared
_SAME_CALLS = 0.9
_RESTART_NS = 100_000_000  # an agent needs longer to start; threads change places within far less
_WALL_WEIGHT = 0.1  # of a difference by wall clocks beside a spread: decides between equal rhythms
_CLOSE = (
    0.5  # spread of the differences, as a share of the usual gap between steps, for ranks of one communicator
)


_NEEDED = (
    *("node", "ts_ns", "comm_hash", "comm_handle", "comm_rank", "nranks"),
    *("seq", "op", "datatype", "count", "peer_rank"),
)


@dataclass(frozen=True, eq=False)  # arrays: equal is what is the same
class _Unit:
    """The calls of one process on one communicator. call: int64, equal for equal calls."""

    rows: Array
    process: int
    node: int
    is_late: bool
    seq: Array
    ts_ns: Array
    call: Array


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
    units = [
        _Unit(
            rows=where,
            process=int(process[where[0]]),
            node=int(rows["node"][where[0]]),
            is_late=bool(is_late[where].any()),
            seq=rows["seq"][where],
            ts_ns=rows["ts_ns"][where],
            call=call[where],
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
        if apart is None:
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
            if spread > _CLOSE * usual_gap:
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
    first = int(reference.seq.min())
    at = np.full(int(reference.seq.max()) - first + 1, -1)
    at[reference.seq - first] = np.arange(len(reference.seq))
    seq, ts_ns, call = unit.seq[-_COMPARED:], unit.ts_ns[-_COMPARED:], unit.call[-_COMPARED:]
    guess = int(reference.seq.max()) - int(unit.seq.max())
    known, by_wall = between.found(reference.node, unit.node), between.by_wall(reference.node, unit.node)
    best, best_distance, offset = guess, np.inf, 0.0
    for shift in range(guess - _REACH, guess + _REACH + 1) if fixed is None else (fixed,):
        place = seq + shift - first
        inside = (place >= 0) & (place < len(at))
        partner = at[place[inside]]
        seen = partner >= 0
        if seen.sum() < max(min(len(seq), 8), 0.5 * min(len(seq), len(at))):
            continue
        partner, mine = partner[seen], np.flatnonzero(inside)[seen]
        if np.mean(reference.call[partner] == call[mine]) < _SAME_CALLS:
            continue
        difference = (ts_ns[mine] - reference.ts_ns[partner]).astype(np.float64)
        middle = float(np.median(difference))
        if known is not None:
            distance = float(np.median(np.abs(difference - known)))
        else:
            distance = float(np.median(np.abs(difference - middle)))
            distance += 0.0 if by_wall is None else _WALL_WEIGHT * abs(middle - by_wall)
        if distance < best_distance:
            best, best_distance, offset = shift, distance, middle
    if known is None and np.isfinite(best_distance):
        between.found_ns[reference.node, unit.node] = offset
    return best, best_distance
