"""The heat map's data: from memory for the last minutes, otherwise from the stored rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.layout import Array
from stallscope.page.cells import NO_DATA, codes, framed
from stallscope.page.memory import Job, JobMemory

if TYPE_CHECKING:
    from stallscope.store.hub.store import HubStore

MOST_COLUMNS = 1200
_S_NS = 10**9


@dataclass(frozen=True)
class Matrix:
    """Codes of lateness and wait, uint8 (ranks, n).

    seq, comm: the round with the latest arrival in each interval; comm is an index of comms.
    """

    ranks: int
    from_ns: int
    bucket_ns: int
    seq: Array
    comm: Array
    comms: Sequence[str]
    late: Array
    wait: Array

    def frame(self) -> bytes:
        """The binary answer."""
        head: Mapping[str, object] = {
            "ranks": self.ranks,
            "from_ms": self.from_ns // 10**6,
            "bucket_ms": self.bucket_ns / 1e6,
            "n": self.late.shape[1],
            "seq": self.seq.tolist(),
            "comm": self.comm.tolist(),
            "comms": list(self.comms),
        }
        return framed(head, self.late, self.wait)


def matrix(store: "HubStore", memory: JobMemory, job: Job, *, from_ns: int, to_ns: int, n: int) -> Matrix:
    """The cells of a job in n intervals of a window. Raises BadInput for an empty or too fine window."""
    if not from_ns < to_ns or not 1 <= n <= MOST_COLUMNS:
        raise BadInput(f"the window needs to > from and 1 to {MOST_COLUMNS} columns; correct from, to, n")
    return _in_memory(memory, job, from_ns, to_ns, n) or _stored(store, job, from_ns, to_ns, n)


def _in_memory(memory: JobMemory, job: Job, from_ns: int, to_ns: int, n: int) -> Matrix | None:
    """The cells from the ring; None if it does not hold the whole window in whole seconds."""
    seconds, rest = divmod(to_ns - from_ns, n * _S_NS)
    if rest or from_ns % _S_NS or seconds < 1:
        return None
    with memory.reading():
        if from_ns // _S_NS <= job.ring.head - job.ring.n:
            return None
        window = job.ring.window(from_ns // _S_NS, n * seconds)
        comms = list(job.ring.comms)
    late, wait = (_pooled(cells, seconds) for cells in (window.late, window.wait))
    at = _latest(window.late, seconds)
    return Matrix(len(late), from_ns, seconds * _S_NS, window.seq[at], window.comm[at], comms, late, wait)


def _pooled(cells: Array, seconds: int) -> Array:
    """The maximum of each group of seconds; NO_DATA only where no second has data."""
    if seconds == 1:
        return cells
    grouped = (cells + np.uint8(1)).reshape(len(cells), -1, seconds).max(axis=2)
    return np.ascontiguousarray(grouped - np.uint8(1))


def _latest(late: Array, seconds: int) -> Array:
    """In each group of seconds, the second with the largest lateness: int64 (n,)."""
    worst = (late + np.uint8(1)).max(axis=0, initial=0).reshape(-1, seconds)
    return np.arange(len(worst)) * seconds + worst.argmax(axis=1)


def _stored(store: "HubStore", job: Job, from_ns: int, to_ns: int, n: int) -> Matrix:
    bucket_ns = -(-(to_ns - from_ns) // n)
    params: dict[str, Any] = {
        "cluster": job.cluster,
        "comms": list(job.comms),
        "from_ns": from_ns,
        "to_ns": to_ns,
        "bucket_ns": bucket_ns,
    }
    table = store.ask("page_matrix", tenant=job.tenant, params=params)
    column = {
        name: table[name].to_numpy(zero_copy_only=False) for name in ("rank", "bucket", "late_ns", "wait_ns")
    }
    n_ranks = max(job.ring.n_ranks, job.n_ranks, int(column["rank"].max(initial=-1)) + 1)
    is_inside = (column["bucket"] >= 0) & (column["bucket"] < n)
    at = column["rank"][is_inside].astype(np.int64), column["bucket"][is_inside].astype(np.int64)
    late, wait = np.full((n_ranks, n), np.nan), np.full((n_ranks, n), np.nan)
    late[at], wait[at] = column["late_ns"][is_inside], column["wait_ns"][is_inside]
    seq, comm = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    number = {name: index for index, name in enumerate(job.comms)}
    order = np.argsort(late[at], kind="stable")
    seqs = table["seq"].to_numpy(zero_copy_only=False)[is_inside]
    names = np.array([number.get(name, 0) for name in table["comm_hash"].to_pylist()], np.int64)[is_inside]
    seq[at[1][order]], comm[at[1][order]] = seqs[order], names[order]
    return Matrix(n_ranks, from_ns, bucket_ns, seq, comm, list(job.comms), codes(late), codes(wait))


def lateness_by_rank(cells: Array) -> Array:
    """Mean code of each rank over the intervals with data, float64 (ranks,); NaN without data."""
    known = cells != NO_DATA
    n = known.sum(axis=1)
    total = np.where(known, cells, 0).sum(axis=1, dtype=float)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)
