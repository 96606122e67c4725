"""Hubs that share their data under faults: nothing acknowledged is lost, nothing is stored twice, slots move in time.

Real processes: PostgreSQL, an S3 server, hubs as a user starts them, and senders that keep a ledger of what was
acknowledged. Each fault happens while rows arrive: a hub killed with SIGKILL, an owner stopped for longer than its
lease, PostgreSQL killed, the bucket away. Meanwhile each batch in ten goes to two hubs at once. Afterwards all batches
are sent again to every hub, and the stored rows are compared with the ledger: lost, twice, open verdicts.

    prove_shared.py --faults kill,stop,postgres,bucket --kills 20
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from report import report  # noqa: E402
from tests import shared_servers  # noqa: E402

from stallscope.exporters import hub_arrow  # noqa: E402
from stallscope.stress import load  # noqa: E402

METHOD = "/stallscope.v1.Ingest/Append"
COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")
INTERVAL_NS = 20_000_000
LATE_NS = 5_000_000
STRAGGLER = 3


@dataclass
class HubProcess:
    """A hub as a user starts it."""

    number: int
    folder: Path
    arguments: list[str]
    grpc_port: int = field(default_factory=shared_servers.free_port)
    api_port: int = field(default_factory=shared_servers.free_port)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        log = self.folder / f"hub{self.number}.log"
        command = [*COMMAND, "hub", "--insecure-no-tls", "--db", str(self.folder / f"cache{self.number}")]
        command += ["--otlp-grpc", f"127.0.0.1:{self.grpc_port}", "--otlp-http", "127.0.0.1:0"]
        command += [
            "--api",
            f"127.0.0.1:{self.api_port}",
            "--peer",
            "127.0.0.1:0",
            "--peer-host",
            "127.0.0.1",
        ]
        with log.open("ab") as output:
            at = output.tell()
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                stdout=output,
                stderr=output,
                env=os.environ | shared_servers.environment(),
            )
        until_s = time.monotonic() + 120
        while b"ready:" not in log.read_bytes()[at:]:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"hub {self.number} does not serve: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def cpu_s(self) -> float:
        """CPU time so far."""
        assert self.process
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """As a user stops it."""
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


@dataclass
class Ledger:
    """What the hubs have acknowledged."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    n_retries: int = 0
    n_duplicates: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Senders:
    """One thread for each cluster; each sends its batches in order, to any hub that answers."""

    def __init__(self, hubs: list[HubProcess], token: str, *, n_clusters: int, ranks: int, rows_per_s: float):
        self.ledger = Ledger()
        self.bodies: dict[str, bytes] = {}
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._calls = [
            grpc.insecure_channel(
                f"127.0.0.1:{hub.grpc_port}", (("grpc.max_reconnect_backoff_ms", 500),)
            ).unary_unary(METHOD)
            for hub in hubs
        ]
        self._ended = threading.Event()
        self._ranks, self._pause_s = ranks, n_clusters * 20 * ranks / rows_per_s
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(n_clusters)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the current batches."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        name, rng = f"c{number}", random.Random(number)
        job = load.Job(
            name=name,
            ranks=self._ranks,
            first_rank=0,
            world=self._ranks,
            interval_ns=INTERVAL_NS,
            straggler=STRAGGLER,
            late_ns=LATE_NS,
        )
        first = origin = load.rounds_until(job, time.time_ns())
        self._send(name, f"{name}-p", {"processes": load.processes(job, origin * INTERVAL_NS)}, 0, rng)
        n, begin_s = 0, time.monotonic()
        while not self._ended.is_set():
            rows = load.collectives(job, first, 20, origin_round=origin)
            first += 20
            self._send(name, f"{name}-{n}", {"collectives": rows}, len(rows), rng)
            n += 1
            self._ended.wait(max(0.0, begin_s + n * self._pause_s - time.monotonic()))

    def _send(self, cluster: str, batch_id: str, tables: dict, n_rows: int, rng: random.Random) -> None:
        body = hub_arrow.request(tables, batch_id=batch_id, node=f"node-{cluster}", cluster=cluster, about={})
        self.bodies[batch_id] = body
        targets = list(range(len(self._calls)))
        rng.shuffle(targets)
        if rng.random() < 0.1 and len(targets) > 1:  # at two hubs at the same moment
            threads = [threading.Thread(target=self._attempt, args=(t, body)) for t in targets[:2]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        while True:
            for target in targets:
                if self._attempt(target, body):
                    with self.ledger.lock:
                        self.ledger.acknowledged[batch_id] = n_rows
                        self.ledger.times.setdefault(cluster, []).append(time.monotonic())
                    return
                with self.ledger.lock:
                    self.ledger.n_retries += 1
            time.sleep(0.2)

    def _attempt(self, target: int, body: bytes) -> bool:
        try:
            answer = json.loads(self._calls[target](body, timeout=10, metadata=self._metadata))
        except grpc.RpcError:
            return False
        with self.ledger.lock:
            self.ledger.n_duplicates += answer["is_duplicate"]
        return True

    def resend_all(self) -> int:
        """Send every batch again, to hubs by turns. Returns the number of batches that were not duplicates."""
        n_new = 0
        for number, body in enumerate(self.bodies.values()):
            while True:
                try:
                    call = self._calls[number % len(self._calls)]
                    n_new += not json.loads(call(body, timeout=20, metadata=self._metadata))["is_duplicate"]
                    break
                except grpc.RpcError:
                    time.sleep(0.2)
        return n_new

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time without an acknowledgement of a cluster that began after a moment."""
        gaps = [
            after - max(before, since_s)
            for times in self.ledger.times.values()
            for before, after in pairwise(times)
            if after > since_s
        ]
        return max(gaps, default=0.0)


def stored(postgres: shared_servers.PostgresServer, dsn: str, bucket: str, folder: Path) -> dict[str, object]:
    """The stored rows and verdicts, read without a hub."""
    import pyarrow.parquet as pq

    from stallscope.store.shared.bucket import Bucket
    from stallscope.store.shared.postgres import Postgres
    from stallscope.store.shared.segment_cache import SegmentCache
    from stallscope.store.shared.tenant_snapshots import Snapshots

    database, objects = Postgres(dsn, name="prove"), Bucket(bucket)
    cache = SegmentCache(folder / "check", objects, max_bytes=1 << 40)
    snapshot = Snapshots(database, objects).snapshot("default", ("collectives", "verdicts"))
    columns = ["cluster_id", "rank", "seq"]
    cache.fetch(snapshot.segments.get("collectives", ()))
    rows: Counter[tuple] = Counter()
    tables = [
        pq.read_table(cache.folder / segment.path, columns=columns, partitioning=None)
        for segment in snapshot.segments.get("collectives", ())
    ]
    if "collectives" in snapshot.hot:
        tables.append(snapshot.hot["collectives"].select(columns))
    for table in tables:
        rows.update(zip(*(table[name].to_pylist() for name in columns), strict=True))
    verdicts = [
        (row["cluster_id"], row["rank"])
        for row in snapshot.hot["verdicts"].to_pylist()
        if row["state"] == "open"
    ]
    database.close()
    cache.close()
    return {
        "rows": sum(rows.values()),
        "twice": sum(n - 1 for n in rows.values()),
        "clusters_with_open_verdict_on_straggler": len({c for c, rank in verdicts if rank == STRAGGLER}),
    }


class _Takeover:
    """Measures the time until no slot belongs to a hub that has just been killed or stopped."""

    def __init__(self, dsn: str, victim: HubProcess):
        assert victim.process
        self._dsn, self._owner = dsn, f"%-{victim.process.pid}-%"
        self._begin_s, self._end_s = time.monotonic(), None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def seconds(self) -> float | None:
        """The time; None if slots still belong to it."""
        return None if self._end_s is None else round(self._end_s - self._begin_s, 1)

    def _run(self) -> None:
        import psycopg

        with psycopg.connect(self._dsn, autocommit=True) as db:
            while time.monotonic() < self._begin_s + 120:
                row = db.execute(
                    "SELECT count(*) FROM stallscope.leases WHERE owner LIKE %s", [self._owner]
                ).fetchone()
                if row == (0,):
                    self._end_s = time.monotonic()
                    return
                time.sleep(0.1)


def prove(arguments: argparse.Namespace) -> dict[str, object]:
    """Run the faults. Returns the figures."""
    rng = random.Random(arguments.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        os.environ.update(shared_servers.environment())
        postgres = stack.enter_context(shared_servers.postgres_server(folder / "postgres"))
        s3 = stack.enter_context(shared_servers.s3_server(folder / "s3"))
        dsn, bucket = postgres.new_database(), s3.bucket()
        settings = folder / "settings.yaml"
        settings.write_text(f"hub_lease_s: {arguments.lease_s}\n")
        shared = ["--shared", dsn, "--bucket", bucket, "--settings", str(settings)]
        token = subprocess.run(
            [
                *COMMAND,
                "hub",
                "token",
                "create",
                "--scope",
                "ingest",
                "--db",
                str(folder / "t"),
                "--settings",
                str(settings),
            ],
            env=os.environ | {"STALLSCOPE_HUB_SHARED": dsn},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        hubs = [HubProcess(n, folder, shared) for n in range(arguments.hubs)]
        for hub in hubs:
            hub.start()
            stack.callback(hub.stop)
        senders = Senders(
            hubs, token, n_clusters=arguments.clusters, ranks=arguments.ranks, rows_per_s=arguments.rows_per_s
        )
        events: list[dict[str, object]] = []
        try:
            time.sleep(arguments.calm_s)
            for fault in arguments.faults.split(","):
                for _ in range(arguments.kills if fault == "kill" else 1):
                    begin_s = time.monotonic()
                    victim = rng.choice(hubs)
                    takeover = _Takeover(dsn, victim) if fault in ("kill", "stop") else None
                    _inject(fault, victim, postgres, s3, arguments)
                    time.sleep(arguments.lease_s + 3 + arguments.calm_s)
                    gap_s = senders.longest_gap_s(begin_s)
                    event: dict[str, object] = {"fault": fault, "longest_gap_s": round(gap_s, 1)}
                    if takeover:
                        event["takeover_s"] = takeover.seconds()
                    events.append(event)
                    print(json.dumps(events[-1]), flush=True)
                    time.sleep(rng.random())
        finally:
            senders.stop()
        n_new = senders.resend_all()
        time.sleep(3)
        found = stored(postgres, dsn, bucket, folder)
        wanted = sum(senders.ledger.acknowledged.values())
        cpu_s = [round(hub.cpu_s(), 1) for hub in hubs]
    return {
        "hubs": arguments.hubs,
        "lease_s": arguments.lease_s,
        "acknowledged_rows": wanted,
        "stored_rows": found["rows"],
        "lost_rows": wanted - (int(str(found["rows"])) - int(str(found["twice"]))),
        "rows_twice": found["twice"],
        "resent_batches": len(senders.bodies),
        "resent_batches_stored_again": n_new,
        "clusters": arguments.clusters,
        "clusters_with_open_verdict_on_straggler": found["clusters_with_open_verdict_on_straggler"],
        "retries": senders.ledger.n_retries,
        "faults": events,
        "cpu_s_of_hubs": cpu_s,
    }


def _inject(
    fault: str,
    hub: HubProcess,
    postgres: shared_servers.PostgresServer,
    s3: shared_servers.S3Server,
    arguments: argparse.Namespace,
) -> None:
    assert hub.process
    if fault == "kill":
        hub.process.kill()
        hub.process.wait(10)
        time.sleep(arguments.lease_s + 4)
        hub.start()
    elif fault == "stop":
        hub.process.send_signal(signal.SIGSTOP)
        time.sleep(2 * arguments.lease_s)
        hub.process.send_signal(signal.SIGCONT)
    elif fault == "postgres":
        postgres.kill()
        time.sleep(arguments.postgres_s)
        postgres.start()
    elif fault == "bucket":
        s3.stop()
        time.sleep(arguments.bucket_s)
        s3.start()
    else:
        raise SystemExit(f"unknown fault {fault}")


def main() -> None:
    """Run and report; the exit code is 1 if a row was lost or stored twice, or a verdict is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hubs", type=int, default=2)
    parser.add_argument("--faults", default="kill,stop,postgres,bucket")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clusters", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rows-per-s", type=float, default=6000)
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--postgres-s", type=float, default=5.0)
    parser.add_argument("--bucket-s", type=float, default=30.0)
    parser.add_argument("--calm-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-result", action="store_true", help="do not write bench/results")
    arguments = parser.parse_args()
    figures = prove(arguments)
    if arguments.no_result:
        print(json.dumps(figures))
    else:
        report("prove_shared", figures)
    is_good = (
        not figures["lost_rows"] and not figures["rows_twice"] and not figures["resent_batches_stored_again"]
    )
    is_good = is_good and figures["clusters_with_open_verdict_on_straggler"] == figures["clusters"]
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
