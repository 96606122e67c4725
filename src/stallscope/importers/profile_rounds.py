"""Rounds across the profiles of several ranks: which kernels belong together, and the offsets of the hosts' clocks.

A profile begins anywhere, so the n-th collectives of two ranks may belong to different rounds. All ranks leave a
synchronising collective together: with the right shift between two ranks, the ends of their kernels differ by the same
amount in every round. That amount is the difference of their clocks; it may be seconds. Where no shift fits,
rounds stay unmatched here, and the diagnosis matches them by their rhythm (timeline/late_attach).

Kernels without arguments (PyTorch before 2.2, CUDA graphs) name no group: the n-th NCCL stream of all ranks is taken as
one group where the ends of its kernels agree, as several groups where they agree within several sets of ranks of one
size, and left out otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import P2P_OPS, SYNCHRONISING_OPS, Op
from stallscope.importers.rank_profile import Profile

_REACH = 128  # shifts tried
_SAME_CALLS = 0.9  # share of equal operations that a shift needs
_MIN_SPREAD_NS = 20_000
_CLEARLY = 4.0  # times less spread than without a shift
_AGREE_NS = 100_000  # ends of one round's kernels on different ranks lie within this time
_OFF_NS = 200_000  # clocks that differ by less are left alone
UNNAMED = "NCCL stream"


@dataclass(frozen=True)
class Series:
    """The collectives of one rank in one group, in order. rows: of the profile's kernels. call: equal for equal calls.
    ends_together: most of them are synchronising.
    """

    profile: int
    rows: Array
    call: Array
    end_ns: Array
    ends_together: bool


@dataclass(frozen=True)
class Match:
    """shift: the n-th call of the second rank is the (n + shift)-th call of the first rank. offset_ns: clock of the
    first rank minus clock of the second rank. spread_ns: median deviation from it. n: rounds compared.
    """

    shift: int
    offset_ns: float
    spread_ns: float
    n: int


def in_order(profile: Profile) -> Array:
    """Arrival, thread and launch of each kernel: rows (arrival_ns, tid, is_graph), int64 (n, 3)."""
    calls, kernels = profile.calls, profile.kernels
    out = np.zeros((len(kernels), 3), np.int64)
    out[:, 0] = kernels["begin_ns"]
    has_launch = calls[calls["correlation"] >= 0]
    launches = has_launch[np.argsort(has_launch["correlation"], kind="stable")]
    position = np.searchsorted(launches["correlation"], kernels["correlation"], side="right") - 1
    is_launched = (position >= 0) & (kernels["correlation"] >= 0)
    is_launched[is_launched] = (
        launches["correlation"][position[is_launched]] == kernels["correlation"][is_launched]
    )
    launch = launches[position[is_launched]]
    out[is_launched, 0], out[is_launched, 1] = launch["begin_ns"], np.maximum(launch["tid"], 0)
    out[is_launched, 2] = launch["op"] == Op.GRAPH_LAUNCH
    return out


def name_groups(profiles: Sequence[Profile]) -> int:
    """Give kernels without arguments a group where their ends allow it. Returns the number of kernels left without."""
    n_left = 0
    by_position: dict[int, list[Series]] = {}
    for number, profile in enumerate(profiles):
        for position, rows in enumerate(_unnamed_streams(profile)):
            by_position.setdefault(position, []).append(_series(number, profile, rows))
    for position, sequences in by_position.items():
        groups = _partition(sequences)
        for members in groups or []:
            _name(profiles, members, position, is_all=len(groups or []) == 1)
        if groups is None:
            n_left += sum(len(sequence.rows) for sequence in sequences)
    return n_left + sum(_n_unnamed(profile, Op.NONE) for profile in profiles)


def _unnamed_streams(profile: Profile) -> list[Array]:
    """The kernels without a group by stream, streams in order of their first kernel."""
    wanted = [
        number
        for number, each in enumerate(profile.collectives)
        if not each.has_arguments and each.op != Op.NONE
    ]
    rows = np.flatnonzero(np.isin(profile.kernels["collective"], wanted))
    rows = rows[np.argsort(profile.kernels["begin_ns"][rows], kind="stable")]
    streams, first = np.unique(profile.kernels["stream"][rows], return_index=True)
    return [rows[profile.kernels["stream"][rows] == stream] for stream in streams[np.argsort(first)]]


def _n_unnamed(profile: Profile, op: Op) -> int:
    wanted = [n for n, each in enumerate(profile.collectives) if not each.has_arguments and each.op == op]
    return int(np.isin(profile.kernels["collective"], wanted).sum())


def _series(number: int, profile: Profile, rows: Array) -> Series:
    codes = np.array([hash((each.op, each.count, each.datatype)) for each in profile.collectives], np.int64)
    is_synchronising = np.array([each.op in SYNCHRONISING_OPS for each in profile.collectives], bool)
    which = profile.kernels["collective"][rows]
    ends_together = 2 * int(is_synchronising[which].sum()) > len(rows)
    return Series(number, rows, codes[which], profile.kernels["end_ns"][rows], ends_together)


def _partition(sequences: list[Series]) -> list[list[Series]] | None:
    """The sequences whose kernels end together, in sets of one size of two or more; None without such sets."""
    left, groups = list(sequences), []
    while left:
        first, *others = left
        group = [first]
        for other in others:
            result = match(first, other)
            if result is not None and result.spread_ns <= _AGREE_NS:
                group.append(other)
        groups.append(group)
        left = [each for each in left if not any(each is member for member in group)]
    sizes = {len(group) for group in groups}
    return groups if len(sizes) == 1 and sizes.pop() > 1 else None


def _name(profiles: Sequence[Profile], members: list[Series], position: int, *, is_all: bool) -> None:
    ranks = tuple(sorted(profiles[member.profile].rank for member in members))
    known = ranks if UNKNOWN not in ranks and len(set(ranks)) == len(ranks) else ()
    world = max(profiles[member.profile].nranks for member in members)
    size = world if is_all and world > len(members) and len(members) == len(profiles) else len(members)
    for member in members:
        profile = profiles[member.profile]
        for number in np.unique(profile.kernels["collective"][member.rows]).tolist():
            named = replace(
                profile.collectives[number],
                group=f"{UNNAMED} {position}",
                ranks=known,
                ranks_text=str(known or position),
                size=size,
            )
            profile.collectives.append(named)
            here = member.rows[profile.kernels["collective"][member.rows] == number]
            profile.kernels["collective"][here] = len(profile.collectives) - 1


def match(first: Series, other: Series) -> Match | None:
    """The shift at which two sequences are the same rounds; None if no shift fits."""
    reach = min(_REACH, max(len(first.call), len(other.call)) - 1)
    result = [each for shift in range(-reach, reach + 1) if (each := _at(first, other, shift)) is not None]
    if not result:
        return None
    prior = len(first.call) - len(other.call)
    plain = next((each for each in result if each.shift == 0), None) or min(
        result, key=lambda each: min(abs(each.shift), abs(each.shift - prior))
    )
    enough = [each for each in result if each.n >= min(3, plain.n)]
    best = min(enough, key=lambda each: (max(each.spread_ns, _MIN_SPREAD_NS), abs(each.shift)))
    is_better = max(best.spread_ns, _MIN_SPREAD_NS) * _CLEARLY < plain.spread_ns
    return best if is_better else plain


def _at(first: Series, other: Series, shift: int) -> Match | None:
    begin, end = max(0, -shift), min(len(other.call), len(first.call) - shift)
    if end - begin < max(1, min(len(first.call), len(other.call)) // 2):
        return None
    here, there = slice(begin, end), slice(begin + shift, end + shift)
    if (first.call[there] == other.call[here]).mean() < _SAME_CALLS:
        return None
    apart = (first.end_ns[there] - other.end_ns[here]).astype(np.float64)
    middle = float(np.median(apart))
    return Match(shift, middle, float(np.median(np.abs(apart - middle))), end - begin)


@dataclass(frozen=True)
class Rounds:
    """number: seq of each kernel of each profile, UNKNOWN where it was not matched. clock_ns: what to add to the times
    of each profile so that kernels of a round end together, and error_ns of it: by profile.
    """

    number: list[Array]
    clock_ns: list[int]
    error_ns: list[int]


def rounds(profiles: Sequence[Profile], units: Sequence[str]) -> Rounds:
    """Number the rounds of all named groups and compare the clocks. units: the clock that each profile is on."""
    number = [np.full(len(profile.kernels), UNKNOWN, np.int64) for profile in profiles]
    links: dict[tuple[str, str], list[Match]] = {}
    for members in _by_group(profiles).values():
        first = max(members, key=lambda member: len(member.rows))
        shifts = {}
        for member in members:
            result = Match(0, 0.0, 0.0, len(member.rows)) if member is first else match(first, member)
            if result is None:
                continue
            shifts[member.profile] = result.shift
            pair = units[first.profile], units[member.profile]
            if pair[0] != pair[1] and result.spread_ns <= _AGREE_NS and member.ends_together:
                links.setdefault(pair, []).append(result)
        start = min(shifts.values(), default=0)
        for member in members:
            if member.profile in shifts:
                seq = np.arange(len(member.rows)) + shifts[member.profile] - start
                number[member.profile][member.rows] = seq
    clocks = _clocks(list(dict.fromkeys(units)), links)
    return Rounds(number, [clocks[unit][0] for unit in units], [clocks[unit][1] for unit in units])


def _by_group(profiles: Sequence[Profile]) -> Mapping[int, list[Series]]:
    """The collectives of each group by rank, without transfers between two ranks."""
    result: dict[int, list[Series]] = {}
    for number, profile in enumerate(profiles):
        if not len(profile.kernels):
            continue
        hashes = np.array(
            [each.comm_hash if each.has_arguments else 0 for each in profile.collectives], np.uint64
        )
        is_round = np.array([each.op not in (*P2P_OPS, Op.NONE) for each in profile.collectives])
        group = hashes[profile.kernels["collective"]]
        order = np.lexsort((profile.kernels["begin_ns"], in_order(profile)[:, 0]))
        order = order[is_round[profile.kernels["collective"][order]]]
        for comm_hash in np.unique(group[order]).tolist():
            if comm_hash:
                result.setdefault(comm_hash, []).append(
                    _series(number, profile, order[group[order] == comm_hash])
                )
    return result


def _clocks(units: list[str], links: dict[tuple[str, str], list[Match]]) -> dict[str, tuple[int, int]]:
    """The shift of each unit's times, and its accuracy, from the links with most rounds first."""
    known = {units[0]: (0.0, 0.0)} if units else {}
    ordered = sorted(links.items(), key=lambda link: -max(each.n for each in link[1]))
    while True:
        link = next((each for each in ordered if (each[0][0] in known) != (each[0][1] in known)), None)
        if link is None:
            break
        (a, b), matches = link
        offset = float(np.median([each.offset_ns for each in matches]))
        error = float(np.median([each.spread_ns for each in matches]))
        base, base_error = known.get(a) or known[b]
        known[b if a in known else a] = (base + (offset if a in known else -offset), base_error + error)
    return {
        unit: (round(offset) if abs(offset) >= _OFF_NS else 0, max(round(error), 1000))
        for unit, (offset, error) in (dict.fromkeys(units, (0.0, 0.0)) | known).items()
    }
