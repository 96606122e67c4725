"""Runs a tenant's SQL in separate processes: bounded in time, rows, bytes and memory, killed at the deadline.

No thread and no engine setting reliably bounds a query: a single function call can run for minutes and allocate any
amount of memory. A signal to a process does. A killed worker is replaced at once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stallscope.errors import Busy, OverLimits, RefusedQuery, StorageFailed, TookTooLong
from stallscope.serve.sql import worker_messages
from stallscope.serve.sql.worker import error_from
from stallscope.store.hub.memory_size import process_memory, resident_bytes
from stallscope.store.hub.row_bounds import RowBounds

if TYPE_CHECKING:
    import pyarrow as pa

_START_S = 60.0
_ABANDON_S = 1.0
_CHECK_EVERY_S = 0.05
_WORKER_BYTES = 200_000_000
"""Resident memory of a worker without a query, and some more."""

_HOT_ROW_BYTES = 1_000
"""Of an unsealed row in a worker, with its copies."""

_LAST_BYTES = 2000
_NO_MEMORY = ("MemoryError", "bad_alloc", "Out of Memory", "out of memory", "Cannot allocate memory")
_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """Limits of one query. timeout_s: deadline for killing it. answer_bytes: size of its rows as JSON.

    memory_bytes: the engine's own limit. resident_bytes: a query is stopped when its process has more resident memory,
    as the engine does not count all of it, or when all processes of the hub together have more than all_bytes.
    address_bytes: the kernel's limit for the process; a new process needs about 0.7 GB of it. patience_s: how long a
    query waits for a free worker. max_hot_rows: newest unsealed rows per table. n_queries: a worker is replaced after
    this many queries, so that leaks do not accumulate.
    """

    timeout_s: float = 10.0
    max_rows: int = 10_000
    answer_bytes: int = 4_000_000
    memory_bytes: int = 512_000_000
    resident_bytes: int = 1_200_000_000
    all_bytes: int | None = None
    address_bytes: int = 2_500_000_000
    patience_s: float = 5.0
    max_hot_rows: int = 200_000
    n_queries: int = 200

    @classmethod
    def within(cls, memory_bytes: int) -> QueryLimits:
        """The limits of a hub whose processes together have this memory limit."""
        engine = min(cls.memory_bytes, memory_bytes // 10)
        return cls(
            memory_bytes=engine,
            resident_bytes=_WORKER_BYTES + 2 * engine,
            all_bytes=memory_bytes,
            max_hot_rows=min(cls.max_hot_rows, engine // _HOT_ROW_BYTES),
        )


@dataclass(frozen=True)
class Rows:
    """columns: names, possibly repeated. truncated: there are more rows than the limit, or than fit into the answer, or
    the answer covers only a part of a table; note then names the table and the covered time.
    """

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    note: str = ""


@dataclass(frozen=True)
class Sources:
    """A tenant's data for a query: the readable folder, its sealed files by table, and hot rows.

    note: the tables that are incomplete, and the start of the covered time; "" if all are complete.
    """

    folder: Path | None
    sealed: Mapping[str, Sequence[Path]]
    hot: Mapping[str, pa.Table]
    note: str = ""


class Data(Protocol):
    """Provides the data of a query."""

    def __call__(self, tenant: str, bounds: Mapping[str, RowBounds], /) -> Sources:
        """The tables with bounds of a tenant from one snapshot: no row within them is duplicated or missing."""


class Workers:
    """A few worker processes, each for one query at a time. Thread-safe."""

    def __init__(
        self,
        data: Data,
        *,
        n: int = 2,
        limits: QueryLimits | None = None,
        on_unreadable: Callable[[str], object] = lambda tenant: None,
    ):
        """on_unreadable: called with the tenant when the engine failed to read a segment."""
        self._on_unreadable = on_unreadable
        self.limits = limits or QueryLimits()
        self._data = data
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._by_tenant: dict[str, int] = {}
        self._n = n
        for _ in range(n):
            self._idle.put(None)  # a slot; its process starts with the first query

    def query(
        self, sql: str, *, tenant: str, params: Mapping[str, Any] | None = None, max_rows: int | None = None
    ) -> Rows:
        """The rows of a tenant's query.

        params: values of $name. max_rows: capped at the limit. Raises BadInput for invalid SQL, RefusedQuery,
        TookTooLong, OverLimits, Busy.
        """
        request = {
            "sql": sql,
            "params": dict(params or {}),
            "max_rows": min(max_rows or self.limits.max_rows, self.limits.max_rows),
            "timeout_s": self.limits.timeout_s,
        }
        worker = self._acquire(tenant)
        deadline_s = time.monotonic() + self.limits.timeout_s
        try:
            answer = self._answer(worker, request, tenant=tenant, deadline_s=deadline_s)
            if answer.get("gone"):  # retention may have removed a file after the files were listed
                answer = self._answer(worker, request, tenant=tenant, deadline_s=deadline_s)
            if answer.get("gone"):
                raise StorageFailed("a segment cannot be read; check the hub's log and its disk")
        except StorageFailed:
            self._on_unreadable(tenant)
            raise
        finally:
            self._give_back(worker, tenant)
        note = answer["note"]
        return Rows(answer["columns"], answer["rows"], answer["truncated"] or bool(note), note)

    def start(self) -> None:
        """Start all processes now, so that the first queries do not wait for them."""
        workers = [self._acquire(f" start {i}") for i in range(self._n)]
        for i, worker in enumerate(workers):
            self._give_back(worker, f" start {i}")

    def close(self) -> None:
        """End all processes. Running queries end with an error."""
        with self._lock:
            self._is_closed = True
            workers, self._all = self._all, set()
        for worker in workers:
            worker.kill()

    def _acquire(self, tenant: str) -> _Worker:
        """A live worker. One tenant never gets all workers."""
        with self._lock:
            if self._by_tenant.get(tenant, 0) >= max(1, self._n - 1):
                raise Busy("your tenant's queries occupy all the workers that it may use; retry in a moment")
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        slot: _Worker | None = None
        try:
            slot = self._idle.get(timeout=self.limits.patience_s)
            return self._alive(slot)
        except queue.Empty:
            self._leave(tenant)
            raise Busy("all SQL workers are busy; retry in a moment") from None
        except BaseException:
            self._leave(tenant)
            self._idle.put(None)
            raise

    def _alive(self, slot: _Worker | None) -> _Worker:
        if slot and slot.is_fit(self.limits):
            return slot
        if slot:
            self._forget(slot)
        worker = _Worker(self.limits)
        with self._lock:
            if self._is_closed:
                worker.kill()
                raise Busy("the hub is shutting down")
            self._all.add(worker)
        return worker

    def _give_back(self, worker: _Worker, tenant: str) -> None:
        if not worker.is_fit(self.limits):
            self._forget(worker)
            self._idle.put(None)
        else:
            self._idle.put(worker)
        self._leave(tenant)

    def _forget(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)

    def _leave(self, tenant: str) -> None:
        with self._lock:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def _answer(
        self, worker: _Worker, request: dict[str, Any], *, tenant: str, deadline_s: float
    ) -> dict[str, Any]:
        """The worker's answer frame. Kills a worker that fails or does not answer in time."""
        try:
            admitted = worker.exchange(request, (), deadline_s=deadline_s)
        except _Broken as broken:
            raise RefusedQuery(f"the SQL crashed the parser ({broken}); simplify the query") from None
        if "error" in admitted:
            raise error_from(admitted)
        bounds = {name: RowBounds.of_json(value) for name, value in admitted["tables"].items()}
        try:
            sources = self._data(tenant, bounds)
        except BaseException:
            worker.abandon_query()
            raise
        header = {
            "folder": str(sources.folder or ""),
            "sealed": {name: [str(path) for path in paths] for name, paths in sources.sealed.items()},
            "hot": list(sources.hot),
        }
        try:
            blobs = [_stream(rows) for rows in sources.hot.values()]
            answer = worker.exchange(header, blobs, deadline_s=deadline_s)
        except _Broken as broken:
            if broken.is_memory:
                raise OverLimits("the query exceeded its memory limit; select less") from None
            raise StorageFailed(f"the SQL worker ended: {broken}") from None
        if "error" in answer:
            raise error_from(answer)
        return {**answer, "note": sources.note}


class _Broken(Exception):
    """The worker ended by itself. is_memory: because it ran out of memory."""

    def __init__(self, reason: str, *, is_memory: bool):
        super().__init__(reason)
        self.is_memory = is_memory


class _Worker:
    """One process and its pipes."""

    def __init__(self, limits: QueryLimits):
        self._n_answered = 0
        self._is_started = self._is_dead = False
        self._limits = limits
        self._last_output, errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-m", "stallscope.serve.sql.worker", json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={"PYTHONPATH": str(_SOURCES), "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        os.close(errors)
        os.set_blocking(self._fd_in, False)
        os.set_blocking(self._fd_out, False)
        try:
            self._received(time.monotonic() + _START_S)
        except EOFError:
            self.kill()
            raise StorageFailed("an SQL worker did not start; check the hub's free memory") from None
        except TookTooLong:
            self.kill()
            raise Busy("an SQL worker did not start in time; retry in a moment") from None
        self._is_started = True

    @property
    def _fd_in(self) -> int:
        assert self._process.stdin
        return self._process.stdin.fileno()

    @property
    def _fd_out(self) -> int:
        assert self._process.stdout
        return self._process.stdout.fileno()

    def is_fit(self, limits: QueryLimits) -> bool:
        """Whether it can take one more query."""
        return not self._is_dead and self._process.poll() is None and self._n_answered < limits.n_queries

    def exchange(self, header: Mapping[str, Any], blobs: Any, *, deadline_s: float) -> dict[str, Any]:
        """Send a frame and wait for the answer. Kills the process before it raises TookTooLong or _Broken."""
        try:
            self._send(worker_messages.packed(header, blobs), deadline_s)
            answer = self._received(deadline_s)
        except EOFError:
            broken = self._death()
            self.kill()
            raise broken from None
        except BaseException:
            self.kill()
            raise
        self._n_answered += 1
        return answer

    def abandon_query(self) -> None:
        """End a query whose data cannot be provided."""
        try:
            self._send(worker_messages.packed({"abandoned": True}), time.monotonic() + _ABANDON_S)
        except (EOFError, TookTooLong):
            self.kill()

    def _death(self) -> _Broken:
        """The reason why the process ended; its last output goes to the hub's log."""
        output = ""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return _Broken("it closed its output", is_memory=False)
        with suppress(BlockingIOError):
            output = os.read(self._last_output, 1 << 16)[-_LAST_BYTES:].decode("utf-8", "replace").strip()
        reason = f"signal {-status}" if status < 0 else f"exit status {status}"
        _LOG.error("an SQL worker ended (%s): %s", reason, output or "no output")
        is_memory = any(word in output for word in _NO_MEMORY) or -status == signal.SIGKILL
        return _Broken(reason, is_memory=is_memory)

    def kill(self) -> None:
        """End the process in any state."""
        self._is_dead = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                try:
                    pipe.close()
                except OSError:  # the dead process did not read all its input
                    continue
        with suppress(OSError):  # closed before
            os.close(self._last_output)
        self._last_output = -1

    def _send(self, parts: list[bytes], deadline_s: float) -> None:
        for part in parts:
            remaining = memoryview(part)
            while remaining:
                self._wait([], [self._fd_in], deadline_s)
                try:
                    remaining = remaining[os.write(self._fd_in, remaining[: 1 << 20]) :]
                except BrokenPipeError:
                    raise EOFError from None

    def _received(self, deadline_s: float) -> dict[str, Any]:
        return worker_messages.unpacked(lambda n: self._read(n, deadline_s))

    def _read(self, n_bytes: int, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            self._wait([self._fd_out], [], deadline_s)
            more = os.read(self._fd_out, min(n_bytes - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _check_memory(self) -> None:
        limits = self._limits
        if resident_bytes(self._process.pid) > limits.resident_bytes:
            raise OverLimits("the query exceeded its memory limit; select less")
        if process_memory().is_above(limits.all_bytes):
            raise OverLimits("the hub has reached its memory limit; select less, or retry later")

    def _wait(self, to_read: list[int], to_write: list[int], deadline_s: float) -> None:
        poll = select.poll()
        for fd in to_read:
            poll.register(fd, select.POLLIN)
        for fd in to_write:
            poll.register(fd, select.POLLOUT)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if poll.poll(min(left_s, _CHECK_EVERY_S) * 1000):
                return
            if self._is_started:
                self._check_memory()
        raise TookTooLong(
            f"the query exceeded its time limit of {self._limits.timeout_s:g} s and was stopped;"
            " select a shorter time, or aggregate"
        )


def _stream(table: pa.Table) -> bytes:
    """The rows as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
