"""The ranks that hold up a hung job, from the collectives that each rank has entered and completed.

For sources that record completion (flags OPEN, NOT_STARTED; last_entered and last_completed of a membership), such as
dumps written when a job has hung. The waits form a graph: a rank in a round waits for the members that have not entered
it, and a receive waits for the sender. A rank that others wait for and that waits for no rank is named. A rank that has
not completed a round which a peer has completed cannot wait for others there: it is stuck itself. A rank without a dump
is named only if no other rank explains the waits, since files get lost. If other ranks are named with a reason, at most
one rank without a dump is named as well.

A round that all have entered and none has completed is stuck on a device or in the fabric: its members are suspects,
and no rank is named. Accuracy: as good as the records. Two ranks' dumps must be from about the same time.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS, CollectiveFlag, Op
from stallscope.events.trace import Trace

_OPEN = CollectiveFlag.OPEN | CollectiveFlag.NOT_STARTED
_MAX_BEHIND = 0.5
"""Share of the ranks behind their peers' completions from which on the counters are considered wrong."""
_MAX_SILENT_SHARE = 0.5  # share of the ranks without a dump from which on a missing dump is not evidence
_SEVERAL = 2

Process = int
Round = tuple[int, int]
Node = Process | Round
"""Processes by their row in trace.processes; rounds by (comm_hash, seq)."""


@dataclass(frozen=True)
class Standstill:
    """The processes that hold up the job.

    held_by: the reason by process: not_entered, not_completed, not_started, no_dump, idle. round: a round that waits
    for them, None for a receive. since_ns: the last entry of a member that is in the round. waiting: all processes that
    wait. suspects: members of a round that all entered and no rank completed, if no rank can be named. is_ahead: the
    suspects are at most half of the ranks and ran ahead into a call, which the other ranks, with all their calls
    completed, do not make. silent: the processes without a dump, some of which may be named. is_circle: the named
    processes wait in a circle.
    """

    held_by: dict[Process, str]
    round: Round | None
    since_ns: int
    waiting: tuple[Process, ...]
    suspects: tuple[Process, ...] = ()
    silent: tuple[Process, ...] = ()
    is_circle: bool = False
    is_ahead: bool = False


@dataclass
class _State:
    """The records of every process, from which the graph of waits follows."""

    n_processes: int
    members: dict[int, dict[Process, int]] = field(default_factory=dict)  # comm -> process -> rank in it
    entered: dict[tuple[int, Process], int] = field(default_factory=dict)
    completed: dict[tuple[int, Process], int] = field(default_factory=dict)
    open: dict[tuple[int, Process], dict[int, tuple[int, int]]] = field(
        default_factory=dict
    )  # seq -> op, flags
    first_open: dict[Process, Round] = field(default_factory=dict)
    present_ns: dict[Round, int] = field(default_factory=dict)
    transfers: list[tuple[Process, Process, bool]] = field(
        default_factory=list
    )  # process, partner, is a receive
    busy: set[Process] = field(default_factory=set)  # have an open call
    started: set[Process] = field(
        default_factory=set
    )  # have an open call that is not recorded as not started
    silent: set[Process] = field(default_factory=set)  # have no dump


def records_completion(trace: Trace) -> bool:
    """Whether the source records which collectives have not completed."""
    return bool((trace.collectives["flags"] & _OPEN).any())


def standstill(trace: Trace) -> Standstill | None:
    """The processes that hold up the job; None if no process waits for another."""
    state = _state(trace)
    held_by = _stuck_themselves(state)
    stuck = set(held_by)
    strong, why = _waits(state, stuck)
    receives, sends = (_transfers(state, stuck, is_receive=kind) for kind in (True, False))
    ends = _ends(
        [_union(strong, receives, sends), _union(strong, receives), strong],
        {p for p in why if why[p] != "no_dump"},
        {p for p in why if why[p] == "no_dump"},
        stuck=frozenset(stuck),
    )
    held_by |= {p: why[p] for p in ends}
    if len(state.silent) > _MAX_SILENT_SHARE * state.n_processes or _is_silence_doubtful(held_by):
        held_by = {p: reason for p, reason in held_by.items() if reason != "no_dump"}
    if held_by and (ahead := _ran_ahead(state, held_by)):
        held = _standstill(state, strong, held_by)
        return replace(held, held_by={}, waiting=ahead, suspects=ahead, is_ahead=True)
    if held_by:
        return _standstill(state, strong, held_by)
    closed = _closed_first(state, strong)
    if closed:
        suspects = sorted({p for r in closed for p in state.members[r[0]]})
        earliest = min(closed, key=lambda r: state.present_ns[r])
        return Standstill(
            {},
            earliest,
            state.present_ns[earliest],
            tuple(sorted(state.busy)),
            suspects=tuple(suspects),
            silent=tuple(sorted(state.silent)),
        )
    circle = {p for p in _waited_for(strong) if isinstance(p, int) and strong.get(p)}
    if not circle:
        return None
    return _standstill(state, strong, dict.fromkeys(circle, "not_entered"), is_circle=True)


def _ran_ahead(state: _State, held_by: dict[Process, str]) -> tuple[Process, ...]:
    """The ranks that wait, if they wait for at least as many other ranks, which completed all their calls.

    Either these other ranks stopped before the same call, or the ranks that wait make an extra call: the dumps do not
    show which. A single rank that is behind has stopped: one rank stops more often than all other ranks run ahead.
    """
    waiting = state.busy - held_by.keys()
    is_finished = all(why == "not_entered" and process not in state.busy for process, why in held_by.items())
    return tuple(sorted(waiting)) if is_finished and len(held_by) >= max(len(waiting), _SEVERAL) else ()


def _is_silence_doubtful(held_by: dict[Process, str]) -> bool:
    """Whether the ranks without a dump may be innocent: other ranks are named, and these ranks may wait for them.

    A single rank without a dump was probably killed. Of several ranks, some dumps may just be lost.
    """
    n_silent = sum(reason == "no_dump" for reason in held_by.values())
    return 1 < n_silent < len(held_by)


def _state(trace: Trace) -> _State:
    number = {
        (int(row["node"]), int(row["pid"])): i for i, row in enumerate(trace.processes[["node", "pid"]])
    }
    state = _State(len(number))
    for row in trace.communicators:
        process = number.get((int(row["node"]), int(row["pid"])))
        if process is None:
            continue
        comm = int(row["comm_hash"])
        state.members.setdefault(comm, {})[process] = int(row["comm_rank"])
        state.entered[comm, process] = int(row["last_entered"])
        state.completed[comm, process] = int(row["last_completed"])
    rows = trace.collectives[np.argsort(trace.collectives["ts_ns"], kind="stable")]
    _add_rows(state, rows, number)
    _complete_before_open(state)
    has_dump = {(int(row["node"]), int(row["pid"])) for row in trace.snapshots[["node", "pid"]]}
    state.silent = {i for process, i in number.items() if process not in has_dump and i not in state.busy}
    return state


def _add_rows(state: _State, rows: Array, number: dict[tuple[int, int], Process]) -> None:
    columns = ("node", "pid", "comm_hash", "seq", "op", "flags", "comm_rank", "peer_rank", "ts_ns")
    for node, pid, comm, seq, op, flags, comm_rank, peer, ts_ns in zip(
        *(rows[name].tolist() for name in columns), strict=True
    ):
        process = number.get((node, pid))
        if process is None:
            continue
        is_open = bool(flags & _OPEN)
        state.members.setdefault(comm, {}).setdefault(process, comm_rank)
        if is_open:
            state.busy.add(process)
        if is_open and not flags & CollectiveFlag.NOT_STARTED:
            state.started.add(process)
        if op in (Op.SEND, Op.RECV):
            others = [p for p, member_rank in state.members[comm].items() if member_rank == peer != UNKNOWN]
            if is_open and others:
                state.transfers.append((process, others[0], op == Op.RECV))
            continue
        if seq == UNKNOWN:
            continue
        key = (comm, process)
        state.entered[key] = max(state.entered.get(key, UNKNOWN), seq)
        if not is_open:
            state.completed[key] = max(state.completed.get(key, UNKNOWN), seq)
            continue
        state.open.setdefault(key, {})[seq] = (op, flags)
        state.first_open.setdefault(process, (comm, seq))
        state.present_ns[comm, seq] = max(state.present_ns.get((comm, seq), 0), ts_ns)


def _complete_before_open(state: _State) -> None:
    """Without a counter, infer the completed rounds: all rounds of a communicator before its first open round."""
    for key, rounds in state.open.items():
        if state.completed.get(key, UNKNOWN) == UNKNOWN:
            state.completed[key] = min(rounds) - 1


def _stuck_themselves(state: _State) -> dict[Process, str]:
    """The processes that are stuck themselves, with the reason: see _behind and _never_started."""
    never_started = _never_started(state)
    return dict.fromkeys(never_started, "not_started") | dict.fromkeys(_behind(state), "not_completed")


def _never_started(state: _State) -> set[Process]:
    """Processes whose GPU has started none of the open calls, while the GPUs of others have."""
    not_started = state.busy - state.started
    return not_started if len(not_started) <= _MAX_BEHIND * state.n_processes else set()


def _behind(state: _State) -> set[Process]:
    """Processes that have not completed a synchronising round which another member has completed."""
    furthest: dict[int, int] = {}
    for (comm, _), seq in state.completed.items():
        furthest[comm] = max(furthest.get(comm, UNKNOWN), seq)
    behind = {
        process
        for (comm, process), rounds in state.open.items()
        for seq, (op, _) in rounds.items()
        if op in SYNCHRONISING_OPS and seq <= furthest.get(comm, UNKNOWN)
    }
    return behind if len(behind) <= _MAX_BEHIND * state.n_processes else set()


def _waits(state: _State, stuck: set[Process]) -> tuple[dict[Node, set[Node]], dict[Process, str]]:
    """The graph of waits in rounds and for idle partners, and the reason for each process that others wait for.

    A member that is stuck in an earlier call holds up a round although it has entered it.
    """
    strong: dict[Node, set[Node]] = {}
    why: dict[Process, str] = {}
    for comm in state.members:
        held = _first_held(state, comm)
        if held is None:
            continue
        seq, present, absent = held
        for process in present - stuck - set(absent):
            strong.setdefault(process, set()).add((comm, seq))
        strong.setdefault((comm, seq), set()).update(absent, present & stuck)
        for process, reason in absent.items():
            why.setdefault(process, reason)
    for process, partner, _ in state.transfers:
        if process not in stuck and partner not in state.busy:
            strong.setdefault(process, set()).add(partner)
            why.setdefault(partner, "no_dump" if partner in state.silent else "idle")
    _add_closed(state, strong, stuck)
    return strong, why


def _transfers(state: _State, stuck: set[Process], *, is_receive: bool) -> dict[Node, set[Node]]:
    """The graph of receives that wait for their sender, or of sends that wait for their receiver."""
    waits: dict[Node, set[Node]] = {}
    for process, partner, kind in state.transfers:
        if process not in stuck and kind == is_receive:
            waits.setdefault(process, set()).add(partner)
    return waits


def _first_held(state: _State, comm: int) -> tuple[int, set[Process], dict[Process, str]] | None:
    """The first round of a communicator that some members hold up: seq, members in it, and reasons by absent member.

    Later rounds cannot begin before it.
    """
    members = state.members[comm]
    open_in: dict[int, dict[Process, int]] = {}
    for process in members:
        for seq, (_, flags) in state.open.get((comm, process), {}).items():
            open_in.setdefault(seq, {})[process] = flags
    for seq, present in sorted(open_in.items()):
        absent = _absent(state, comm, seq, present)
        if absent:
            return seq, set(present), absent
    return None


def _absent(state: _State, comm: int, seq: int, present: dict[Process, int]) -> dict[Process, str]:
    """The members that hold up a round, with the reason. present: the flags of members with this open round."""
    not_entered: dict[Process, str] = {}
    others = [p for p in state.members[comm] if p not in present]
    for process in others:
        entered = state.entered.get((comm, process), UNKNOWN)
        # Without a counter, the majority decides.
        is_out = entered < seq if entered != UNKNOWN else 2 * len(present) >= len(others) + len(present)
        if process not in state.silent and is_out:
            not_entered[process] = "not_entered"
    if not_entered:
        return not_entered
    silent = [process for process in others if process in state.silent]
    if silent:
        return dict.fromkeys(silent, "no_dump")
    behind = [
        p for p, flags in present.items() if flags & CollectiveFlag.NOT_STARTED and p not in state.started
    ]
    return dict.fromkeys(behind, "not_started") if len(behind) < len(present) else {}


def _add_closed(state: _State, strong: dict[Node, set[Node]], stuck: set[Process]) -> None:
    """A round that all entered and none completed holds its members. Each member is held by its first open round."""
    for process, (comm, seq) in state.first_open.items():
        if process in stuck or strong.get((comm, seq)):
            continue
        members = state.members[comm]
        if len(members) > 1 and all(state.entered.get((comm, p), UNKNOWN) >= seq for p in members):
            strong.setdefault(process, set()).add((comm, seq))
    for node in [node for targets in list(strong.values()) for node in targets if isinstance(node, tuple)]:
        if not strong.get(node):
            strong[node] = set(state.members[node[0]])


def _ends(
    graphs: list[dict[Node, set[Node]]],
    lacking: set[Process],
    silent: set[Process],
    *,
    stuck: frozenset[Process],
) -> set[Process]:
    """The processes with a reason that others wait for and that wait for no process.

    graphs: from all waits to only the most certain waits. A host may continue after a send or a receive. So these waits
    count unless they close a circle; then they are dropped. silent: processes without a dump. They are chosen only for
    waits that no other process explains.
    """
    ends: set[Node] = set(stuck)
    settled: set[Node] = set()
    for graph in graphs:
        settled |= _reaching(graph, ends)
        ends |= {node for node in _sinks(_without(graph, settled)) if node in lacking}
        settled |= _reaching(graph, ends)
        unsettled = _without(graph, settled)
        unexplained = _reached_from(unsettled, (node for node in unsettled if isinstance(node, int)))
        ends |= {node for node in _sinks(unsettled) if node in silent & unexplained}
        settled |= _reaching(graph, ends)
    return {node for node in ends - stuck if isinstance(node, int)}


def _without(graph: dict[Node, set[Node]], gone: set[Node]) -> dict[Node, set[Node]]:
    return {
        node: {n for n in targets if n not in gone} for node, targets in graph.items() if node not in gone
    }


def _reached_from(graph: dict[Node, set[Node]], starts: Iterable[Node]) -> set[Node]:
    """All nodes that can be reached from the starts, the starts included."""
    reached, queue = set(), deque(starts)
    while queue:
        node = queue.popleft()
        if node not in reached:
            reached.add(node)
            queue.extend(graph.get(node, ()))
    return reached


def _union(*graphs: dict[Node, set[Node]]) -> dict[Node, set[Node]]:
    return {node: set().union(*(graph.get(node, set()) for graph in graphs)) for node in set().union(*graphs)}


def _waited_for(graph: dict[Node, set[Node]]) -> set[Node]:
    return set().union(*graph.values()) if graph else set()


def _sinks(graph: dict[Node, set[Node]]) -> set[Node]:
    return {node for node in _waited_for(graph) if isinstance(node, int) and not graph.get(node)}


def _reaching(graph: dict[Node, set[Node]], goals: Iterable[Node]) -> set[Node]:
    """All nodes from which a goal can be reached, the goals included."""
    before: dict[Node, list[Node]] = {}
    for node, targets in graph.items():
        for target in targets:
            before.setdefault(target, []).append(node)
    reaching, queue = set(goals), deque(goals)
    while queue:
        for node in before.get(queue.popleft(), ()):
            if node not in reaching:
                reaching.add(node)
                queue.append(node)
    return reaching


def _closed_first(state: _State, strong: dict[Node, set[Node]]) -> list[Round]:
    """Rounds that are the first open round of every member: no other round holds them, so the fault is there."""
    rounds = {r for r in state.first_open.values() if strong.get(r) == set(state.members[r[0]])}
    agreed = [r for r in rounds if all(state.first_open.get(p) == r for p in state.members[r[0]])]
    return sorted(agreed or rounds, key=lambda r: state.present_ns[r])


def _standstill(
    state: _State, strong: dict[Node, set[Node]], held_by: dict[Process, str], *, is_circle: bool = False
) -> Standstill:
    rounds = [node for node in strong if isinstance(node, tuple) and strong[node] & set(held_by)]
    rounds += [
        state.first_open[p] for p in held_by if held_by[p] == "not_completed" and p in state.first_open
    ]
    first = min(rounds, key=lambda r: state.present_ns[r], default=None)
    return Standstill(
        held_by=dict(sorted(held_by.items())),
        round=first,
        since_ns=state.present_ns[first] if first else UNKNOWN,
        waiting=tuple(sorted(state.busy - set(held_by))),
        silent=tuple(sorted(state.silent)),
        is_circle=is_circle,
    )
