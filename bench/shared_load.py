"""Jobs with known faults that send rows to several hubs, and a ledger of the acknowledged rows.

A job's rank is late in some periods and on time between them; the periods are the truth for the verdicts. Each job
sends its batches in order, to any hub that answers, one batch in ten to two hubs at the same moment.
"""

import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import grpc
import numpy as np

from stallscope.events.layout import Array
from stallscope.exporters import hub_arrow
from stallscope.stress import load

_METHOD = "/stallscope.v1.Ingest/Append"
_INTERVAL_NS = 80_000_000
_LATE_NS = 20_000_000
_BATCH_NS = 1_000_000_000
_FIRST_ROUND = 1000
_MIN_FAULT_S, _MAX_FAULT_S = 45.0, 120.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 20.0, 60.0
_TO_TWO_HUBS = 0.1
_GIVE_UP_S = 120.0
_RESENT_AT_ONCE = 16
_ANSWER_S = 1.0
"""A stopped hub never answers: the sender then asks another hub with the same batch."""


@dataclass(frozen=True)
class Period:
    """A period in which a rank is late, ns since 1970. is_over: the job has sent rounds without delay since."""

    rank: int
    begin_ns: int
    end_ns: int
    is_over: bool = False


class FaultyJob:
    """A job whose ranks are late by turns. Its rows continue without a gap, the time ledger included."""

    def __init__(self, number: int, ranks: int, rng: random.Random, *, is_healthy: bool, begin_ns: int):
        """begin_ns: of the first round, ns since 1970."""
        self.name, self.ranks, self.is_healthy = f"c{number}", ranks, is_healthy
        self.periods: list[Period] = []
        self._rng = rng
        self._straggler: int | None = None
        self._round = self._origin = _FIRST_ROUND
        self._begin_ns = begin_ns
        self._until_ns = begin_ns + self._seconds_ns(10.0, _MIN_PAUSE_S)
        self._ledger = np.zeros((ranks, 1), np.int64)
        self._n_syncs = np.zeros(ranks, np.uint32)

    def processes(self) -> Array:
        """One row for each rank."""
        return load.processes(self._job(), self._begin_ns)

    def now_ns(self) -> int:
        """The start of the next round."""
        return self._begin_ns + (self._round - self._origin) * self._job().interval_ns

    def due_s(self) -> float:
        """Time until the next batch may be sent, by the wall clock."""
        return (self.now_ns() + _BATCH_NS - time.time_ns()) / 1e9

    def rows(self) -> Array:
        """The rows of the next rounds."""
        if self.now_ns() >= self._until_ns:
            self._change()
        job = self._job()
        n = _BATCH_NS // job.interval_ns
        rows = load.collectives(job, self._round, n, origin_round=self._origin)
        by_rank = rows.reshape(n, self.ranks)
        for name in ("ts_ns", "wait_enter_ns", "wait_leave_ns"):
            by_rank[name] += self._begin_ns - self._origin * job.interval_ns
        by_rank["ledger_ns"] += self._ledger
        by_rank["n_syncs"] += self._n_syncs
        self._last = by_rank[-1]
        self._round += n
        if self._straggler is not None:
            self.periods[-1] = replace(self.periods[-1], end_ns=self.now_ns())
        return rows

    def _job(self) -> load.Job:
        late_ns = 0 if self._straggler is None else _LATE_NS
        return load.Job(
            name=self.name,
            ranks=self.ranks,
            first_rank=0,
            world=self.ranks,
            interval_ns=_INTERVAL_NS + late_ns,
            straggler=self._straggler,
            late_ns=late_ns,
        )

    def _change(self) -> None:
        """Begin or end a fault."""
        self._ledger = np.array(self._last["ledger_ns"])
        self._n_syncs = np.array(self._last["n_syncs"])
        self._begin_ns, self._origin = self.now_ns(), self._round
        if self._straggler is not None:
            self.periods[-1] = replace(self.periods[-1], is_over=True)
        if self._straggler is not None or self.is_healthy:
            self._straggler = None
            self._until_ns = self._begin_ns + self._seconds_ns(_MIN_PAUSE_S, _MAX_PAUSE_S)
            return
        self._straggler = self._rng.randrange(self.ranks)
        self._until_ns = self._begin_ns + self._seconds_ns(_MIN_FAULT_S, _MAX_FAULT_S)
        self.periods.append(Period(self._straggler, self._begin_ns, self._begin_ns))

    def _seconds_ns(self, min_s: float, max_s: float) -> int:
        return round(self._rng.uniform(min_s, max_s) * 1e9)


@dataclass
class Ledger:
    """What the hubs have acknowledged: rows by batch; by cluster, the times of acknowledgements (monotonic)."""

    rows: dict[str, int] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    n_retries: int = 0
    n_to_two_hubs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def first_after_s(self, cluster: str, since_s: float) -> float | None:
        """The first acknowledgement of a cluster after a moment, in s since then; None: none yet."""
        with self.lock:
            times = [each for each in self.times_s.get(cluster, ()) if each > since_s]
        return min(times) - since_s if times else None


class Senders:
    """One thread for each job."""

    def __init__(self, ports: Sequence[int], token: str, jobs: Sequence[FaultyJob]):
        self.ledger = Ledger()
        self.bodies: dict[str, bytes] = {}
        self.jobs = jobs
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._calls: list[grpc.UnaryUnaryMultiCallable] = []
        for port in ports:
            self.add_hub(port)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
        self._failures: list[Exception] = []
        self._last_error = ""
        for thread in self._threads:
            thread.start()

    def add_hub(self, port: int) -> None:
        """Send to this hub as well."""
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.max_reconnect_backoff_ms", 500),))
        self._calls.append(channel.unary_unary(_METHOD))

    def stop(self) -> None:
        """End after the current batches. Raises the first error of a sender."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises the first error of a sender, which would otherwise hide lost rows."""
        if self._failures:
            raise self._failures[0]

    def _guarded(self, job: FaultyJob) -> None:
        try:
            self._run(job)
        except Exception as error:  # noqa: BLE001 (raised by check())
            self._failures.append(error)

    def _run(self, job: FaultyJob) -> None:
        rng = random.Random(job.name)
        self._send(job.name, f"{job.name}-p", {"processes": job.processes()}, 0, rng)
        n = 0
        while not self._ended.is_set():
            rows = job.rows()
            self._send(job.name, f"{job.name}-{n}", {"collectives": rows}, len(rows), rng)
            n += 1
            self._ended.wait(max(0.0, job.due_s()))

    def _send(
        self, cluster: str, batch_id: str, tables: dict[str, Array], n_rows: int, rng: random.Random
    ) -> None:
        body = hub_arrow.request(tables, batch_id=batch_id, node=f"node-{cluster}", cluster=cluster, about={})
        self.bodies[batch_id] = body
        calls = list(self._calls)
        rng.shuffle(calls)
        if rng.random() < _TO_TWO_HUBS and len(calls) > 1:
            threads = [threading.Thread(target=self._is_accepted, args=(call, body)) for call in calls[:2]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with self.ledger.lock:
                self.ledger.n_to_two_hubs += 1
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + _GIVE_UP_S:
            for call in calls:
                if self._is_accepted(call, body):
                    with self.ledger.lock:
                        self.ledger.rows[batch_id] = n_rows
                        self.ledger.times_s.setdefault(cluster, []).append(time.monotonic())
                    return
                with self.ledger.lock:
                    self.ledger.n_retries += 1
            time.sleep(0.2)
        raise TimeoutError(f"no hub accepts {batch_id}: {self._last_error}")

    def _is_accepted(self, call: grpc.UnaryUnaryMultiCallable, body: bytes) -> bool:
        try:
            call(body, timeout=_ANSWER_S, metadata=self._metadata)
        except grpc.RpcError as error:
            self._last_error = f"{error.code().name}: {error.details()}"
            return False
        return True

    def resend_all(self) -> int:
        """Send every batch again, to the hubs by turns. Returns the number of batches that were stored again."""
        with ThreadPoolExecutor(_RESENT_AT_ONCE) as threads:
            return sum(threads.map(self._is_new, range(len(self.bodies)), self.bodies.values()))

    def _is_new(self, number: int, body: bytes) -> bool:
        call, begin_s = self._calls[number % len(self._calls)], time.monotonic()
        while time.monotonic() < begin_s + _GIVE_UP_S:
            try:
                return not json.loads(call(body, timeout=20, metadata=self._metadata))["is_duplicate"]
            except grpc.RpcError:
                time.sleep(0.2)
        raise TimeoutError("no hub accepts a batch that is sent again")
