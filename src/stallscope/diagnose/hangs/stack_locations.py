"""Ranks grouped by the location of their main thread, from stack dumps, and the few ranks that differ from the rest.

A single dump shows the locations of ranks, but no durations. A rank waits if its stack contains a collective, a
synchronise call or a frame of NCCL or CUDA. If most ranks wait at one location and a few ranks are elsewhere, these few
ranks are the likely cause of a hang. If all ranks wait, or are at many locations, no rank is named.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stallscope.diagnose.timeline import user_frame
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_WAITS = re.compile(
    r"\b(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|synchronize|wait_stream|batch_isend"
    r"|_?coalescing_manager|send|recv|wait)\w* \(?.*(?:torch/|distributed|cuda)|torch/distributed/\S+:\d+ \w+"
    r"|torch/cuda/\S+:\d+ synchronize|\bnccl[A-Z_]\w+|\bcu(?:da)?(?:Stream|Event|Ctx|Device|Context)Synchronize"
    r"|\((?:lib(?:nccl|cuda|cudart)[-.][^()]*)\)|c10d::|ProcessGroupNCCL"
)
_ODD_SHARE = 1 / 3  # of the ranks may be elsewhere


@dataclass(frozen=True)
class StackGroup:
    """Ranks at one location. location: the innermost frame of their own code; frames: of the first rank."""

    ranks: tuple[int, ...]
    location: str
    waits: bool
    frames: tuple[str, ...]


@dataclass(frozen=True)
class OddRanks:
    """groups: largest first. odd: the ranks for which the others likely wait, () if none can be named."""

    groups: tuple[StackGroup, ...]
    odd: tuple[int, ...]
    because: str


def stack_groups(trace: Trace) -> tuple[StackGroup, ...]:
    """The groups of the newest stacks, largest first; ranks without a stack are left out."""
    stacks = _newest(trace)
    by_location: dict[tuple[str, bool], list[int]] = {}
    for rank, threads in sorted(stacks.items()):
        main = threads[0]
        waits = any(_WAITS.search(frame) for frame in main)
        by_location.setdefault((_user_frame(main), waits), []).append(rank)
    groups = [
        StackGroup(tuple(ranks), location, waits, stacks[ranks[0]][0])
        for (location, waits), ranks in by_location.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def _newest(trace: Trace) -> dict[int, list[tuple[str, ...]]]:
    """The stacks of each rank's newest dump, main thread first."""
    ranks = trace.launcher_ranks()
    newest: dict[int, tuple[int, list[tuple[str, ...]]]] = {}
    order = trace.positions[["ts_ns", "node", "pid", "tid", "stack"]].tolist()
    for ts_ns, node, pid, _tid, stack in sorted(order):
        rank = ranks.get((node, pid))
        frames = trace.stacks.get(stack, ())
        if rank is None or rank == UNKNOWN or not frames:
            continue
        if rank not in newest or newest[rank][0] != ts_ns:
            newest[rank] = ts_ns, []
        newest[rank][1].append(frames)
    return {rank: threads for rank, (_, threads) in newest.items()}


def _user_frame(frames: Sequence[str]) -> str:
    return user_frame.in_own_code(frames)


def odd_ranks(trace: Trace) -> OddRanks | None:
    """The ranks at another location than most ranks; None if fewer than two ranks have a stack."""
    groups = stack_groups(trace)
    n_ranks = sum(len(group.ranks) for group in groups)
    if n_ranks < 2:
        return None
    first, *others = groups
    elsewhere = [group for group in others if not group.waits]
    odd = tuple(sorted(rank for group in elsewhere for rank in group.ranks))
    waiting = sum(len(group.ranks) for group in groups if group.waits)
    if first.waits and odd and len(odd) <= max(_ODD_SHARE * n_ranks, 1) and waiting + len(odd) == n_ranks:
        return OddRanks(groups, odd, "")
    if waiting == n_ranks and len(groups) == 1:
        return OddRanks(
            groups, (), "all ranks wait at the same location: a device or the fabric, or a running job"
        )
    if waiting == n_ranks and len(others) == 1 and len(others[0].ranks) <= _ODD_SHARE * n_ranks:
        return OddRanks(groups, others[0].ranks, "")
    if not waiting:
        return OddRanks(groups, (), "no rank waits in a collective or for its GPU")
    return OddRanks(
        groups, (), "the ranks are at several locations, and no small group differs from the rest"
    )
