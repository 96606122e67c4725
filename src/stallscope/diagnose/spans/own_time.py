"""Slow ranks from spans of work: the work of each rank per step, compared with the peers that do the same work.

For sources that record the duration of each piece of work (op COMPUTE) and the start of each collective. Peers are
ranks that share weights or gradients: the members of a communicator with all-gathers or reduce-scatters, otherwise
with all-reduces of ranks that have the same kinds of work.

Durations need no common clock. Lateness is the excess over the peers of the time from the start of the step to the end
of the last work before the last common round, each on its own clock. A late rank without more work than its peers is a
victim that waited. A whole group of peers with more work than the others is a slow stage, not a faulty machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import median_of_others, numbered
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import UNKNOWN, Array, process_keys
from stallscope.events.names import P2P_OPS, Op
from stallscope.events.trace import Trace

_WORTH = 2.0  # threshold of uneven work, as a multiple of the share that makes a single step late
_MOST, _SOME, _FEW = (
    0.5,
    0.1,
    5,
)  # share of steps: uneven in most; in some, if several ranks were late in a few
_SHARING = (Op.ALL_GATHER, Op.REDUCE_SCATTER)


@dataclass(frozen=True)
class Work:
    """Steps x processes (s, p), float64 ns, NaN where a process took no part in a step.

    rank, node: int64 (p,), of the processes, which are in order of node and pid. own_ns: the work of each.
    reach_ns: from its beginning of the step to the end of its last work before the last round with its peers.
    length_ns: of the step, from the first beginning to the last end, float64 (s,). began_ns: int64 (s,).
    step: as the source numbers them, int64 (s,). peers, pipeline: int64 (p,), number of the group of peers, and of
    the ranks it exchanges activations with. n_pieces: pieces of the most frequent kind of work in a step, that is
    micro-batches.
    """

    rank: Array
    node: Array
    own_ns: Array
    reach_ns: Array
    length_ns: Array
    began_ns: Array
    step: Array
    peers: Array
    pipeline: Array
    n_pieces: int

    @property
    def step_ns(self) -> float:
        return float(np.median(self.length_ns)) if len(self.length_ns) else 0.0


@dataclass(frozen=True)
class HeavyStage:
    """A group of peers with more work than the others in every step.

    excess_ns: beyond the median of the other groups. loss_ns: time that each step would save at least with evenly
    spread work, float64 (s,).
    """

    processes: Array
    excess_ns: float
    loss_ns: Array


@dataclass(frozen=True)
class UnevenWork:
    """Work that differs between peers from step to step.

    spread_ns: longest minus mean, of the worst group, float64 (s,). worst: its process, int64 (s,). is_late: bool
    (s,), steps in which the spread exceeds the threshold.
    """

    spread_ns: Array
    worst: Array
    is_late: Array


def work(trace: Trace, *, first_step: int) -> Work | None:
    """The work of a trace from the training step `first_step` on; None where the source records no work."""
    spans = trace.spans[trace.spans["step"] >= first_step]
    if not (spans["op"] == Op.COMPUTE).any():
        return None
    in_order, first_row = np.unique(process_keys(trace.processes), return_index=True)
    process = _process_of(spans, in_order)
    spans, process = spans[process >= 0], process[process >= 0]
    steps, step = np.unique(spans["step"], return_inverse=True)
    shape = (len(steps), len(in_order))
    is_work = spans["op"] == Op.COMPUTE
    begin, own = np.full(shape, np.iinfo(np.int64).max), np.zeros(shape)
    np.minimum.at(begin, (step, process), spans["ts_ns"])
    np.add.at(own, (step[is_work], process[is_work]), spans["duration_ns"][is_work])
    took_part = np.zeros(shape, bool)
    took_part[step[is_work], process[is_work]] = True
    own[~took_part] = np.nan
    first, last = _ends(spans, step, len(steps))
    peers = _peers(trace, spans, process, in_order)
    return Work(
        rank=trace.processes["rank"][first_row].astype(np.int64),
        node=trace.processes["node"][first_row].astype(np.int64),
        own_ns=_complete(own, step[is_work], process[is_work], peers),
        reach_ns=_reach(
            spans[is_work],
            step[is_work],
            process[is_work],
            begin=begin,
            met_ns=_met(trace, first, begin, in_order),
        ),
        length_ns=(last - first).astype(np.float64),
        began_ns=first,
        step=steps.astype(np.int64),
        peers=peers,
        pipeline=_connected(trace, in_order, P2P_OPS),
        n_pieces=_n_pieces(spans[is_work], step[is_work], process[is_work]),
    )


def min_slow_ns(done: Work, limits: Thresholds) -> float:
    """The additional work relative to the peers from which a step counts as slow."""
    noise = limits.noise_factor * _noise_ns(done.own_ns)
    return max(limits.min_late_ns, limits.late_step_share * done.step_ns, noise)


def slow_steps(done: Work, limits: Thresholds) -> list[LateStep]:
    """The steps in which a process had more work than its peers and reached their round as much later."""
    excess, late = _beyond_peers(done.own_ns, done.peers), _beyond_peers(done.reach_ns, done.peers)
    late = np.where(np.isnan(late), excess, late)
    noise = limits.steady_noise_factor * _noise_ns(done.own_ns)
    steady = max(limits.min_late_ns, limits.steady_step_share * done.step_ns, noise)
    both = np.nan_to_num(np.fmin(excess, late), nan=0.0)
    is_steady = (both >= steady).mean(axis=0) >= limits.steady_share
    needed = np.where(is_steady, steady, min_slow_ns(done, limits))
    is_slow = (both >= needed) & (excess >= limits.source_share * late)
    return [
        LateStep(
            process=int(process),
            step=int(step),
            first_row=UNKNOWN,
            peak_row=UNKNOWN,
            late_ns=float(late[step, process]),
            excess_ns=float(excess[step, process]),
            n_rounds=1,
        )
        for step, process in np.argwhere(is_slow)
    ]


def losses_ns(done: Work, named: Mapping[int, list[LateStep]]) -> dict[int, Array]:
    """By process: the time that each step would save at least without the late steps of the named processes.

    Returns float64 (s,) by process. Ranks of other pipelines may be late as well, so only the lateness beyond all of
    these ranks counts. Lateness that several named processes have in common is divided among them.
    """
    beyond = {process: np.zeros(len(done.step)) for process in named}
    in_step: dict[int, set[int]] = {}
    for process, late in named.items():
        for late_step in late:
            in_step.setdefault(late_step.step, set()).add(process)
    for process, late in named.items():
        others = (done.pipeline != done.pipeline[process]) & (done.peers == done.peers[process])
        for late_step in late:
            reach = done.reach_ns[late_step.step]
            held_up = done.pipeline[list(in_step[late_step.step])]
            known = others & np.isfinite(reach) & ~np.isin(done.pipeline, held_up)
            own = reach[process] - reach[known].max() if known.any() else late_step.late_ns
            most = max(min(own, late_step.late_ns), 0.0) if np.isfinite(own) else late_step.late_ns
            beyond[process][late_step.step] = most
    return dict(zip(beyond, _shared(np.array(list(beyond.values()))), strict=True)) if beyond else {}


def _shared(beyond: Array) -> Array:
    """Delays of several processes in a step (k, s) as shares of the longest delay.

    Each stretch of time is divided equally among the processes whose delays include it.
    """
    order = np.argsort(beyond, axis=0)
    in_order = np.take_along_axis(beyond, order, axis=0)
    n_left = np.arange(len(beyond), 0, -1)[:, None]
    pieces = np.diff(in_order, axis=0, prepend=0.0) / n_left
    out = np.empty_like(beyond)
    np.put_along_axis(out, order, np.cumsum(pieces, axis=0), axis=0)
    return out


def heavy_stage(done: Work, named: set[int], limits: Thresholds) -> HeavyStage | None:
    """The group of peers with more work than all others in most steps, without the named processes."""
    kept = np.array([p for p in range(len(done.peers)) if p not in named], np.int64)
    groups = np.unique(done.peers[kept])
    if len(groups) < 2:
        return None
    each = np.stack([_median(done.own_ns[:, kept[done.peers[kept] == g]]) for g in groups], axis=1)
    usable = np.isfinite(each).all(axis=1)
    each = each[usable]
    if not len(each):
        return None
    median_ns = np.median(each, axis=0)
    slow = int(np.argmax(median_ns))
    excess = median_ns[slow] - float(np.median(np.delete(median_ns, slow)))
    often = float(np.mean(np.argmax(each, axis=1) == slow))
    if excess < max(limits.imbalance_share * done.step_ns, limits.min_late_ns) or often < limits.steady_share:
        return None
    # One of the pieces fills and drains the pipeline, which takes the same time with evenly spread work.
    loss = np.zeros(len(done.step))
    loss[usable] = np.maximum(each[:, slow] - each.mean(axis=1), 0.0) * (1 - 1 / max(done.n_pieces, 1))
    return HeavyStage(kept[done.peers[kept] == groups[slow]], float(excess), loss)


def spread(done: Work, late: list[LateStep], named: set[int], limits: Thresholds) -> UnevenWork | None:
    """Work of a changing rank that is uneven among peers, without the named processes. late: all slow steps."""
    own = done.own_ns.copy()
    own[:, sorted(named)] = np.nan
    above = np.zeros(own.shape)
    for group in np.unique(done.peers):
        members = done.peers == group
        if np.isfinite(own[:, members]).any(axis=0).sum() > 1:
            above[:, members] = np.nan_to_num(own[:, members] - _mean(own[:, members])[:, None], nan=0.0)
    largest, left = above.max(axis=1), [late_step for late_step in late if late_step.process not in named]
    is_late = largest >= max(_WORTH * limits.late_step_share * done.step_ns, limits.min_late_ns)
    is_late[[late_step.step for late_step in left]] = True
    by_turns = (
        len({late_step.process for late_step in left}) > 1
        and len({late_step.step for late_step in left}) >= _FEW
    )
    if not len(largest) or is_late.mean() < (_SOME if by_turns else _MOST):
        return None
    return UnevenWork(np.where(is_late, largest, 0.0), np.argmax(above, axis=1), is_late)


def longer_kinds(trace: Trace, done: Work, process: int, steps: list[int]) -> dict[str, tuple[float, float]]:
    """By kind of work: ns per step of a process beyond its peers', and its length as a multiple of theirs.

    steps: rows of the Work.
    """
    spans = trace.spans[(trace.spans["op"] == Op.COMPUTE) & np.isin(trace.spans["step"], done.step[steps])]
    owner = _process_of(spans, np.unique(process_keys(trace.processes)))
    labels, label = np.unique(spans["label"], return_inverse=True)
    total = np.zeros((len(done.peers), len(labels)))
    np.add.at(total, (owner[owner >= 0], label[owner >= 0]), spans["duration_ns"][owner >= 0])
    per_step = total / max(len(steps), 1)
    is_peer = (done.peers == done.peers[process]) & (np.arange(len(done.peers)) != process)
    peer_median_ns = np.median(per_step[is_peer], axis=0) if is_peer.any() else np.zeros(len(labels))
    own_ns = per_step[process]
    return {
        name.decode("utf-8", "replace"): (
            float(own - other_ns),
            float(own / other_ns) if other_ns > 0 else 0.0,
        )
        for name, own, other_ns in zip(labels.tolist(), own_ns, peer_median_ns, strict=True)
    }


def _ends(spans: Array, step: Array, n_steps: int) -> tuple[Array, Array]:
    first, last = np.full(n_steps, np.iinfo(np.int64).max), np.zeros(n_steps, np.int64)
    np.minimum.at(first, step, spans["ts_ns"])
    np.maximum.at(last, step, spans["ts_ns"] + spans["duration_ns"])
    return first, last


def _complete(own: Array, step: Array, process: Array, peers: Array) -> Array:
    """Own times, NaN for a process with fewer pieces than its peers in a step, because records were lost."""
    n = np.zeros(own.shape, np.int64)
    np.add.at(n, (step, process), 1)
    most = np.zeros(own.shape, np.int64)
    for group in np.unique(peers):
        most[:, peers == group] = n[:, peers == group].max(axis=1, keepdims=True)
    return np.where(n == most, own, np.nan)


def _met(trace: Trace, first_ns: Array, begin: Array, in_order: Array) -> Array:
    """When each process begins its last round with its peers in a step: int64 (s, p); the largest int for never."""
    rows = trace.collectives[np.isin(trace.collectives["op"], _SHARING)]
    process = _process_of(rows, in_order)
    step = np.searchsorted(first_ns, rows["ts_ns"], side="right") - 1
    usable = (process >= 0) & (step >= 0)
    met = np.full(begin.shape, -1)
    np.maximum.at(met, (step[usable], process[usable]), rows["ts_ns"][usable])
    return np.where(met < 0, np.iinfo(np.int64).max, met)


def _reach(spans: Array, step: Array, process: Array, *, begin: Array, met_ns: Array) -> Array:
    """From each process's beginning of a step to the end of its work before met_ns: float64 (s, p), NaN unknown."""
    before = spans["ts_ns"] < met_ns[step, process]
    spans, step, process = spans[before], step[before], process[before]
    end = np.full(begin.shape, -1)
    np.maximum.at(end, (step, process), spans["ts_ns"] + spans["duration_ns"])
    return np.where(end >= 0, (end - begin).astype(np.float64), np.nan)


def _process_of(rows: Array, in_order: Array) -> Array:
    """The process of each row, by the keys of the processes; UNKNOWN for none of them."""
    if not len(in_order):
        return np.full(len(rows), UNKNOWN)
    index = np.searchsorted(in_order, process_keys(rows))
    index = np.minimum(index, len(in_order) - 1)
    return np.where(in_order[index] == process_keys(rows), index, UNKNOWN)


def _peers(trace: Trace, spans: Array, process: Array, in_order: Array) -> Array:
    """Number of the group of peers of each process: int64 (p,)."""
    sharing = _connected(trace, in_order, _SHARING)
    if len(np.unique(sharing)) < len(sharing):
        return sharing
    kinds: list[frozenset[bytes]] = [
        frozenset(np.unique(spans["label"][process == p]).tolist()) for p in range(len(in_order))
    ]
    reducing = _connected(trace, in_order, (Op.ALL_REDUCE,))
    number_of_kind = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    return numbered(reducing, np.array([number_of_kind[kind] for kind in kinds]))[0]


def _connected(trace: Trace, in_order: Array, ops: tuple[Op, ...]) -> Array:
    """Groups of processes that share communicators with such operations: int64 (p,), numbered from 0."""
    rows = trace.collectives[np.isin(trace.collectives["op"], ops)]
    group = np.arange(len(in_order))
    if not len(rows):
        return group
    process = _process_of(rows, in_order)
    pairs = np.unique(np.stack([rows["comm_hash"].view(np.int64), process]), axis=1)
    pairs = pairs[:, pairs[1] >= 0]
    for comm in np.unique(pairs[0]):
        members = pairs[1][pairs[0] == comm]
        group[np.isin(group, group[members])] = group[members].min()
    _, number = np.unique(group, return_inverse=True)
    return number.astype(np.int64).reshape(-1)


def _n_pieces(spans: Array, step: Array, process: Array) -> int:
    _, counts = np.unique(
        numbered(step, process, np.unique(spans["label"], return_inverse=True)[1])[0], return_counts=True
    )
    return int(np.quantile(counts, 0.9)) if len(counts) else 1


def _beyond_peers(value: Array, peers: Array) -> Array:
    """Each value minus the median of the peers' in the same step: float64 (s, p), NaN without peers."""
    out = np.full(value.shape, np.nan)
    known = np.isfinite(value)
    step, process = np.nonzero(known)
    group, _ = numbered(step, peers[process])
    out[known] = value[known] - median_of_others(group, value[known])
    return out


def _noise_ns(own: Array) -> float:
    """The variation of a quiet process's work from step to step: robust, the lower quartile of the processes."""
    if own.shape[0] < 4:
        return 0.0
    spreads = [1.4826 * _median(np.abs(column - _median(column)))[()] for column in own.T]
    finite = [value for value in spreads if np.isfinite(value)]
    return float(np.quantile(finite, 0.25)) if finite else 0.0


def _median(values: Array) -> Array:
    """Median of the finite values along the last axis; NaN without any."""
    known = np.isfinite(values)
    filled = np.where(known.any(axis=-1, keepdims=True), values, 0.0)
    middle: Array = np.where(known.any(axis=-1), np.nanmedian(filled, axis=-1), np.nan)
    return middle


def _mean(values: Array) -> Array:
    known = np.isfinite(values)
    mean: Array = np.where(known, values, 0.0).sum(axis=-1) / np.maximum(known.sum(axis=-1), 1)
    return mean
