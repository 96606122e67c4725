"""The verdict on the first failure that logs state."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.evidence_fields import LaterFailure, VerdictEvidence
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.events.failure_labels import FAILURE_LABELS, failure_words
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_AT_ONCE_NS = 1_000_000_000
_MOST = 16
_WALL_NS = 10**17  # smaller times are the order of lines


@dataclass(frozen=True)
class _Failure:
    """The failure of a rank, from all lines about it. rank: UNKNOWN where no line names it."""

    rank: int
    ts_ns: int
    words: str
    status: int
    pid: int
    host: str
    node: int
    stack: tuple[str, ...]
    is_machine: bool = False


def failure_verdict(trace: Trace) -> Verdict | None:
    """The verdict on the first failure; None where the files state no failure."""
    failures = _failures(trace)
    if not failures:
        return None
    first = failures[0]
    ranks = sorted({failure.rank for failure in failures if failure.rank != UNKNOWN})
    same = [failure for failure in failures if _normal(failure.words) == _normal(first.words)]
    known = {rank for rank in trace.launcher_ranks().values() if rank != UNKNOWN}
    if len(same) > 1 and 2 * len(same) > len(known):
        return _all_failed(same)
    others = [failure for failure in failures[1:] if failure.rank != first.rank]
    evidence = VerdictEvidence(
        stated=first.words,
        n_failures=len(failures),
        exit_status=first.status if first.status != UNKNOWN else None,
        pid=first.pid if first.pid != UNKNOWN else None,
        at=user_frame.in_own_code(first.stack) if first.stack else None,
        stack=list(first.stack) or None,
        also_failed_later=[LaterFailure(other.rank, stated=other.words) for other in others[:_MOST]] or None,
        failed_ranks=ranks[:_MOST] if len(ranks) > 1 else None,
    )
    is_close = any(failure.ts_ns - first.ts_ns < _AT_ONCE_NS for failure in others)
    return Verdict(
        kind="failure",
        summary="",
        ranks=[first.rank] if first.rank != UNKNOWN else [],
        nodes=[host] if (host := first.host or trace.nodes[first.node]) else [],
        since_ns=first.ts_ns if first.ts_ns > _WALL_NS else None,
        n_incidents=1,
        confidence=0.6 if is_close or first.rank == UNKNOWN else 0.85,
        victims=sorted(known - {first.rank}),
        advice=_advice(first),
        evidence=evidence,
    )


def _failures(trace: Trace) -> list[_Failure]:
    """The failures by time, one per rank; a statement of the machine on a rank explains the end of that rank."""
    ranks = trace.launcher_ranks()
    kinds = {FAILURE_LABELS["failure"]: False, FAILURE_LABELS["machine"]: True}
    by_key: dict[tuple[int, int], _Failure] = {}
    for row in np.sort(trace.annotations, order="ts_ns", kind="stable"):
        is_machine = kinds.get(bytes(row["label"]))
        if is_machine is None:
            continue
        words = failure_words(bytes(row["value"]))
        node, pid, ts_ns = int(row["node"]), int(row["pid"]), int(row["ts_ns"])
        rank = ranks.get((node, pid), UNKNOWN)
        failure = _Failure(
            rank,
            ts_ns,
            words.words,
            words.status,
            words.pid,
            words.host,
            node,
            _stack(trace, node, pid, ts_ns),
            is_machine,
        )
        key = (rank, 0) if rank != UNKNOWN else (UNKNOWN, len(by_key))
        by_key[key] = failure if key not in by_key else _joined(by_key[key], failure)
    return sorted(_explained(list(by_key.values())), key=lambda failure: failure.ts_ns)


def _joined(first: _Failure, second: _Failure) -> _Failure:
    """The failure from two lines on one rank: the words of the error, the status of the end."""
    error = next((failure for failure in (first, second) if failure.is_machine or failure.stack), first)
    return replace(
        error,
        ts_ns=min(first.ts_ns, second.ts_ns),
        status=max(first.status, second.status),
        pid=max(first.pid, second.pid),
        host=first.host or second.host,
        stack=first.stack or second.stack,
    )


def _explained(failures: list[_Failure]) -> list[_Failure]:
    """The failures, with kills and errors without a rank joined to the only rank that they can belong to."""
    for unassigned in [unassigned for unassigned in failures if unassigned.rank == UNKNOWN]:
        same_pid = [
            other for other in failures if other.rank != UNKNOWN and other.pid == unassigned.pid != UNKNOWN
        ]
        same_end = [
            other
            for other in failures
            if other.rank != UNKNOWN
            and (
                other.status == unassigned.status != UNKNOWN
                or (not unassigned.is_machine and not other.stack)
            )
        ]
        owners = same_pid or same_end
        if len(owners) == 1:
            failures = [other for other in failures if other is not unassigned and other is not owners[0]]
            joined = _joined(replace(unassigned, rank=owners[0].rank, node=owners[0].node), owners[0])
            failures.append(replace(joined, rank=owners[0].rank, node=owners[0].node))
    return failures


def _stack(trace: Trace, node: int, pid: int, ts_ns: int) -> tuple[str, ...]:
    rows = trace.positions
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & (rows["ts_ns"] == ts_ns)]
    return trace.stacks.get(int(rows["stack"][0]), ()) if len(rows) else ()


def _normal(words: str) -> str:
    """The beginning of an error without its numbers, which is equal for the same error of two ranks."""
    return _NUMBERS.sub("", words)[:48]


def _all_failed(same: Sequence[_Failure]) -> Verdict:
    ranks = sorted({failure.rank for failure in same if failure.rank != UNKNOWN})
    stack = next((failure.stack for failure in same if failure.stack), ())
    evidence = VerdictEvidence(
        stated=same[0].words,
        failed_ranks=ranks[:_MOST],
        at=user_frame.in_own_code(stack) if stack else None,
        stack=list(stack) or None,
    )
    return Verdict(
        kind="inconclusive",
        summary="",
        n_incidents=1,
        confidence=0.6,
        abstained_because=f"{len(same)} ranks failed with the same error: {same[0].words}",
        advice=[f"Read the traceback at {evidence.at}." if stack else "Read the first traceback of the log."],
        evidence=evidence,
    )


def _advice(failure: _Failure) -> list[str]:
    words = failure.words.lower()
    if "out-of-memory" in words or "out of memory (slurm)" in words:
        return ["Give the job more host memory, or reduce the memory of its data loaders."]
    if "xid" in words:
        return ["Look up the Xid in NVIDIA's documentation, drain the node, and run dcgmi diag on that GPU."]
    if "cuda out of memory" in words or "outofmemoryerror" in words:
        return ["Compare this rank with its peers: the batch, and other processes on the GPU."]
    if failure.stack:
        return [f"Look at {user_frame.in_own_code(failure.stack)}: the traceback ends there."]
    return ["Read the last lines of that rank's log."]
