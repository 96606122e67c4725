"""The heat map's data: from memory for the last minutes, otherwise from the stored rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.layout import Array
from stallscope.page.cells import codes, framed
from stallscope.page.job_cells import JobCells, JobMemory
from stallscope.page.tenant_jobs import Job

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

MAX_COLUMNS = 1200
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


def matrix(store: "Store", memory: JobMemory, job: Job, *, from_ns: int, to_ns: int, n: int) -> Matrix:
    """The cells of a job in n intervals of a window. Raises BadInput for an empty or too fine window."""
    if not from_ns < to_ns or not 1 <= n <= MAX_COLUMNS:
        raise BadInput(f"the window needs to > from and 1 to {MAX_COLUMNS} columns; correct from, to, n")
    cells = job.cells and _in_memory(memory, job.cells, from_ns, to_ns, n)
    return cells or _stored(store, job, from_ns, to_ns, n)


def _in_memory(memory: JobMemory, cells: JobCells, from_ns: int, to_ns: int, n: int) -> Matrix | None:
    """The cells from the ring; None if it does not hold the whole window in whole seconds."""
    seconds, rest = divmod(to_ns - from_ns, n * _S_NS)
    if rest or from_ns % _S_NS or seconds < 1:
        return None
    with memory.reading():
        if from_ns // _S_NS <= cells.ring.head - cells.ring.n:
            return None
        window = cells.ring.window(from_ns // _S_NS, n * seconds)
        comms = list(cells.ring.comms)
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


def _stored(store: "Store", job: Job, from_ns: int, to_ns: int, n: int) -> Matrix:
    bucket_ns = -(-(to_ns - from_ns) // n)
    params: dict[str, Any] = {"from_ns": from_ns, "to_ns": to_ns, "bucket_ns": bucket_ns}
    table = store.ask("page_matrix", tenant=job.tenant, params=params, job=job.filter)
    column = {
        name: table[name].to_numpy(zero_copy_only=False) for name in ("rank", "bucket", "late_ns", "wait_ns")
    }
    n_ranks = max(job.n_ranks if len(table) else 0, int(column["rank"].max(initial=-1)) + 1)
    is_inside = (column["bucket"] >= 0) & (column["bucket"] < n)
    at = column["rank"][is_inside].astype(np.int64), column["bucket"][is_inside].astype(np.int64)
    late, wait = np.full((n_ranks, n), np.nan), np.full((n_ranks, n), np.nan)
    late[at], wait[at] = column["late_ns"][is_inside], column["wait_ns"][is_inside]
    seq, comm = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    comms = table["comm_hash"].unique().to_pylist()
    number = {name: index for index, name in enumerate(comms)}
    order = np.argsort(late[at], kind="stable")
    seqs = table["seq"].to_numpy(zero_copy_only=False)[is_inside]
    names = np.array([number.get(name, 0) for name in table["comm_hash"].to_pylist()], np.int64)[is_inside]
    seq[at[1][order]], comm[at[1][order]] = seqs[order], names[order]
    return Matrix(n_ranks, from_ns, bucket_ns, seq, comm, comms, codes(late), codes(wait))
