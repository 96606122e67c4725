"""The cells of a hub's jobs in memory: filled from the store once, then fed with each commit.

The cells of communicators that share processes are kept together, under the communicator with the most ranks, of
several the smallest hash. The table `jobs` decides which processes are a job (tenant_jobs.py). Commits only enter a
queue, and a thread of this module does the work. Rows beyond the queue's limit are counted and left out.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import StallscopeError
from stallscope.events.layout import Array
from stallscope.page.cell_ring import SECONDS, Arrivals, Ring

if TYPE_CHECKING:
    from stallscope.store.hub.batches import Batch
    from stallscope.store.hub.store_protocol import Store

_LOG = logging.getLogger(__name__)
_EVERY_S = 0.25
_RATE_S = 5.0
_MAX_QUEUED_ROWS = 2_000_000
_MAX_FILL_ROWS = 3_000_000
_MAX_JOBS = 1_000
_MAX_BYTES = 512 << 20
_MAX_RANKS = 1 << 16
_FORGET_S = 900.0
_P2P = pa.array(["send", "recv"])
_COLUMNS = {
    "cluster_id": pa.string(),
    "node_id": pa.string(),
    "pid": pa.int64(),
    "comm_hash": pa.string(),
    "nranks": pa.int64(),
    "comm_rank": pa.int64(),
    "rank": pa.int64(),
    "op": pa.string(),
    "seq": pa.int64(),
    "ts_ns": pa.int64(),
    "wait_enter_ns": pa.int64(),
    "wait_leave_ns": pa.int64(),
}


@dataclass(eq=False)
class JobCells:
    """Processes that share communicators. processes: (machine, pid) by rank. comm: their largest communicator.

    keys, process_keys: its communicators and processes in JobMemory. Merging and forgetting a job changes only these: a
    tenant chooses the number of its jobs, and a pass over all jobs for each change took minutes.
    """

    tenant: str
    cluster: str
    comm: str
    n_ranks: int
    op: str
    ring: Ring = field(default_factory=Ring)
    processes: dict[int, tuple[str, int]] = field(default_factory=dict)
    is_placed: Array = field(default_factory=lambda: np.zeros(0, bool))
    first_ns: int = 0
    last_ns: int = 0
    first_seq: int = -1
    last_seq: int = -1
    fed_s: float = 0.0
    keys: list[tuple[str, str, str]] = field(default_factory=list)
    process_keys: list[tuple[str, str, str, int]] = field(default_factory=list)

    @property
    def comms(self) -> list[str]:
        return self.ring.comms

    @property
    def rounds_per_s(self) -> float | None:
        """Mean over the time in memory; None for fewer than two rounds."""
        span_s = (self.last_ns - self.first_ns) / 1e9
        n = self.last_seq - self.first_seq
        return n / span_s if span_s > 0 and n > 0 else None


def job_id(cluster: str, comm: str) -> str:
    """The id of a job in links."""
    return f"{cluster}:{comm}"


class JobMemory:
    """The jobs of all tenants. Thread-safe; close() before the store is closed."""

    def __init__(
        self,
        store: "Store",
        *,
        clock_s: Callable[[], float] = time.monotonic,
        since_ns: int | None = None,
    ):
        """since_ns: of the stored rows to start with; None: the seconds that a ring holds."""
        self._since_ns = since_ns
        self._store, self._clock_s = store, clock_s
        self._lock = threading.RLock()
        self._queue: deque[tuple[str, pa.Table]] = deque()
        self._n_queued = 0
        self._jobs: dict[tuple[str, str, str], JobCells] = {}
        self._of_process: dict[tuple[str, str, str, int], JobCells] = {}
        self._rates: dict[str, float] = {}
        self._rated_s = clock_s()
        self._n_of: dict[str, int] = {}
        self.n_rows_left_out = 0
        self._n_taken = 0
        self._ended = threading.Event()
        self._is_filled = threading.Event()
        store.subscribe(self._on_commit)
        self._thread = threading.Thread(target=self._run, name="page-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()

    def wait_until_current(self, timeout_s: float = 30.0) -> bool:
        """Wait until all committed rows have been added. Returns whether they have."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._lock:
                if self._is_filled.is_set() and not self._queue and not self._n_taken:
                    return True
            time.sleep(0.01)
        return False

    def jobs(self, tenant: str) -> list[JobCells]:
        """The jobs of a tenant."""
        with self._lock:
            return list(dict.fromkeys(job for key, job in self._jobs.items() if key[0] == tenant))

    def job(self, tenant: str, cluster: str, comm: str) -> JobCells | None:
        """The job that a communicator belongs to."""
        return self._jobs.get((tenant, cluster, comm))

    def of_process(self, tenant: str, cluster: str, node: str, pid: int) -> JobCells | None:
        """The job of a process."""
        return self._of_process.get((tenant, cluster, node, pid))

    def rows_per_s(self, tenant: str) -> float:
        """Collectives that arrive from a tenant, over the last seconds."""
        return round(self._rates.get(tenant, 0.0), 1)

    def reading(self) -> threading.RLock:
        """The lock under which the rings of jobs may be read."""
        return self._lock

    def _on_commit(self, batch: "Batch") -> None:
        """A committed batch; called in the writer's thread."""
        rows = batch.tables.get("collectives")
        if rows is None or not len(rows):
            return
        if self._n_queued + len(rows) > _MAX_QUEUED_ROWS:
            self.n_rows_left_out += len(rows)
            return
        self._n_queued += len(rows)
        self._queue.append((batch.tenant, rows))

    def _run(self) -> None:
        self._guarded(self._fill)
        self._n_of, self._rated_s = {}, self._clock_s()
        self._is_filled.set()
        while not self._ended.wait(_EVERY_S):
            self._guarded(self._turn)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Rows that this module cannot use must not end the page."""
        try:
            step()
        except StallscopeError as error:
            _LOG.warning("some rows could not be added to the data of the page: %s", error)
        except Exception:  # noqa: BLE001 (logged; the rows of other jobs are still shown)
            _LOG.exception("some rows could not be added to the data of the page")

    def _fill(self) -> None:
        """Add the stored rows of the last minutes."""
        from_ns = time.time_ns() - SECONDS * 10**9 if self._since_ns is None else self._since_ns
        for tenant in self._store.tenants():
            params = {"from_ns": from_ns, "max_rows": _MAX_FILL_ROWS}
            self._add(tenant, self._store.ask("page_rows", tenant=tenant, params=params))
        self._settle()

    def _turn(self) -> None:
        """Add the queued rows, enter complete rounds, and forget jobs without data."""
        by_tenant: dict[str, list[pa.Table]] = {}
        n = 0
        while self._queue:
            tenant, rows = self._queue.popleft()
            self._n_taken = 1
            n += len(rows)
            by_tenant.setdefault(tenant, []).append(_picked(rows))
        for tenant, parts in by_tenant.items():
            self._add(tenant, pa.concat_tables(parts))
        self._settle()
        self._n_queued -= n
        self._n_taken = 0

    def _settle(self) -> None:
        now_s = self._clock_s()
        with self._lock:
            jobs = list(dict.fromkeys(self._jobs.values()))
            for job in jobs:
                job.ring.settle(now_s)
            self._forget(jobs, now_s)
            self._rate(now_s)

    def _rate(self, now_s: float) -> None:
        """Update the rows per second of each tenant, every few seconds."""
        span_s = now_s - self._rated_s
        if span_s >= _RATE_S:
            self._rates = {tenant: n / span_s for tenant, n in self._n_of.items()}
            self._n_of, self._rated_s = {}, now_s

    def _forget(self, jobs: list[JobCells], now_s: float) -> None:
        """Drop jobs that have sent nothing for long, and the longest silent jobs beyond the limits."""
        jobs.sort(key=lambda job: job.fed_s)
        n_bytes = sum(job.ring.n_bytes for job in jobs)
        n_jobs = len(jobs)
        for job in jobs:
            is_over = n_bytes > _MAX_BYTES or n_jobs > _MAX_JOBS
            if not is_over and now_s - job.fed_s <= _FORGET_S:
                break
            for key in job.keys:
                self._jobs.pop(key, None)
            for process in job.process_keys:
                self._of_process.pop(process, None)
            n_bytes, n_jobs = n_bytes - job.ring.n_bytes, n_jobs - 1

    def _add(self, tenant: str, rows: pa.Table) -> None:
        for cluster, comm, part in _by_communicator(_picked(rows)):
            self._add_part(tenant, cluster, comm, part)

    def _add_part(self, tenant: str, cluster: str, comm: str, rows: pa.Table) -> None:
        column = {name: _numbers(rows[name]) for name in _COLUMNS if _COLUMNS[name] == pa.int64()}
        index = np.where(column["rank"] >= 0, column["rank"], column["comm_rank"])
        is_usable = (index >= 0) & (index < _MAX_RANKS) & (column["seq"] >= 0) & (column["ts_ns"] > 0)
        n_ranks = int(column["nranks"].max(initial=0))
        if n_ranks < 2 or not is_usable.any():
            return
        wait_ns = np.where(
            (column["wait_enter_ns"] > 0) & (column["wait_leave_ns"] >= column["wait_enter_ns"]),
            (column["wait_leave_ns"] - column["wait_enter_ns"]).astype(float),
            np.nan,
        )
        arrivals = Arrivals(index, column["seq"], column["ts_ns"], wait_ns).part(is_usable)
        with self._lock:
            job = self._job(tenant, cluster, comm, n_ranks, str(rows["op"][0].as_py() or ""))
            job = self._note_processes(job, rows, column["pid"], index, is_usable)
            job.fed_s = self._clock_s()
            job.ring.add(comm, arrivals, n_ranks=n_ranks, now_s=job.fed_s)
            self._n_of[tenant] = self._n_of.get(tenant, 0) + len(index)
            _note_times(job, comm, arrivals)

    def _job(self, tenant: str, cluster: str, comm: str, n_ranks: int, op: str) -> JobCells:
        key = (tenant, cluster, comm)
        if key not in self._jobs:
            self._jobs[key] = JobCells(tenant, cluster, comm, n_ranks, op)
            self._jobs[key].keys.append(key)
        job = self._jobs[key]
        if _comes_first(n_ranks, comm, job):
            job.comm, job.n_ranks, job.op = comm, n_ranks, op
            job.first_seq = job.last_seq = -1
        return job

    def _note_processes(
        self, job: JobCells, rows: pa.Table, pid: Array, index: Array, is_usable: Array
    ) -> JobCells:
        """Note the process of each rank; jobs that share a process become one."""
        most = int(index[is_usable].max()) + 1
        if most > len(job.is_placed):
            job.is_placed = np.pad(job.is_placed, (0, most - len(job.is_placed)))
        candidates = np.flatnonzero(is_usable & ~job.is_placed[np.where(is_usable, index, 0)])
        new, first = np.unique(index[candidates], return_index=True)
        job.is_placed[new] = True
        for rank, row in zip(new.tolist(), candidates[first].tolist(), strict=True):
            node = rows["node_id"][row].as_py() or ""
            job.processes[rank] = (node, int(pid[row]))
            if pid[row] <= 0:
                continue
            process = (job.tenant, job.cluster, node, int(pid[row]))
            other = self._of_process.get(process)
            if other is None:
                self._of_process[process] = job
                job.process_keys.append(process)
            elif other is not job:
                job = self._merged(other, job)
        return job

    def _merged(self, older: JobCells, newer: JobCells) -> JobCells:
        """One job of two that share a process: the larger is kept, so that repeated merges move few keys.

        older: its process of a rank is kept.
        """
        is_swapped = _n_keys(newer) > _n_keys(older)
        kept, given_up = (newer, older) if is_swapped else (older, newer)
        kept.ring.absorb(given_up.ring)
        for rank, process in given_up.processes.items():
            if is_swapped or rank not in kept.processes:
                kept.processes[rank] = process
        if len(given_up.is_placed) > len(kept.is_placed):
            kept.is_placed, given_up.is_placed = given_up.is_placed.copy(), kept.is_placed
        kept.is_placed[: len(given_up.is_placed)] |= given_up.is_placed
        kept.last_ns = max(kept.last_ns, given_up.last_ns)
        if _comes_first(given_up.n_ranks, given_up.comm, kept):
            kept.comm, kept.n_ranks, kept.op = given_up.comm, given_up.n_ranks, given_up.op
            kept.first_ns, kept.first_seq, kept.last_seq = (
                given_up.first_ns,
                given_up.first_seq,
                given_up.last_seq,
            )
        self._jobs |= dict.fromkeys(given_up.keys, kept)
        self._of_process |= dict.fromkeys(given_up.process_keys, kept)
        kept.keys += given_up.keys
        kept.process_keys += given_up.process_keys
        return kept


def _n_keys(job: JobCells) -> int:
    return len(job.keys) + len(job.process_keys)


def _comes_first(n_ranks: int, comm: str, job: JobCells) -> bool:
    """Whether a communicator is the key of a job rather than the present key: more ranks, then the smaller hash."""
    return (-n_ranks, comm) < (-job.n_ranks, job.comm)


def _note_times(job: JobCells, comm: str, arrivals: Arrivals) -> None:
    job.last_ns = max(job.last_ns, int(arrivals.ts_ns.max()))
    if comm != job.comm:
        return
    low, high = int(arrivals.seq.min()), int(arrivals.seq.max())
    if job.first_seq < 0:
        job.first_seq, job.first_ns = low, int(arrivals.ts_ns.min())
    job.last_seq = max(job.last_seq, high)


def _picked(rows: pa.Table) -> pa.Table:
    """The columns of this module, in one type; missing columns are NULL."""
    there = set(rows.column_names)
    arrays = [
        rows.column(name).cast(kind) if name in there else pa.nulls(len(rows), kind)
        for name, kind in _COLUMNS.items()
    ]
    return pa.table(dict(zip(_COLUMNS, arrays, strict=True)))


def _by_communicator(rows: pa.Table) -> Iterator[tuple[str, str, pa.Table]]:
    """The rows of each cluster and communicator, without send and recv."""
    is_p2p = pc.fill_null(pc.is_in(rows["op"], value_set=_P2P), False)
    rows = rows.filter(pc.and_(pc.invert(is_p2p), pc.is_valid(rows["comm_hash"])))
    if not len(rows):
        return
    names = [
        pc.fill_null(rows[name], "").combine_chunks().dictionary_encode()
        for name in ("cluster_id", "comm_hash")
    ]
    clusters, comms = (name.dictionary.to_pylist() for name in names)
    key = _numbers(names[0].indices) * len(comms) + _numbers(names[1].indices)
    if len(clusters) * len(comms) > 1:
        order = np.argsort(key, kind="stable")
        rows, key = rows.take(pa.array(order)), key[order]
    edges = np.flatnonzero(np.r_[True, np.diff(key) != 0, True])
    for begin, end in pairwise(edges.tolist()):
        number = int(key[begin])
        yield clusters[number // len(comms)], comms[number % len(comms)], rows.slice(begin, end - begin)


def _numbers(column: Any) -> Array:
    """A column as int64, -1 for NULL."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(array.fill_null(-1) if array.null_count else array).astype(np.int64)
