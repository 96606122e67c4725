"""Hubs that share their data under faults: nothing acknowledged is lost, nothing is stored twice, no verdict is lost.

Real processes: PostgreSQL, an S3 server, two hubs and then four, and jobs that send rows all the time. The ranks of
the jobs are late by turns, and some jobs are healthy. Faults: hubs killed with SIGKILL at random moments, an owner
stopped for longer than its lease, PostgreSQL killed, the bucket away. Each batch in ten goes to two hubs at once, and
the clocks of the third and the fourth hub are wrong. At the end all batches are sent again to the hubs by turns, and
the stored rows and verdicts are compared with the senders' own records.

A takeover is the time from the kill or the stop to the first acknowledgement of every job whose slot the hub owned;
it includes the time for which a sender waits for an answer before it asks another hub (1 s).

    prove_shared.py --faults kill,stop,postgres,bucket --kills 20
"""

import argparse
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import report
from shared_hubs import HubProcess, Servers, servers
from shared_load import FaultyJob, Senders
from shared_truth import stored_rows, verdict_figures

from stallscope.store.shared.slots import slot_of

SEAL_AFTER_S, OBJECT_BYTES = 20.0, 16_000
"""Far below the constants of the product, so that faults also meet files and journal objects that are being written."""
SKEW_S = (0.0, 0.0, 20.0, -20.0)
MAX_OVER_LEASE_S = 3.0
MIN_PERIOD_S, MAX_OPEN_S = 20.0, 150.0
"""A shorter fault needs no verdict; a moved verdict closes two minutes after its fault at the latest."""
SETTLE_S = 30.0
_GIVE_UP_S = 120.0


class Proof:
    """A run: the servers, the hubs, the senders, and what happened."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack):
        self._arguments, self._rng = arguments, random.Random(arguments.seed)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self._folder.chmod(0o755)
        self._servers: Servers = stack.enter_context(servers(self._folder))
        self._stack = stack
        self._hubs: list[HubProcess] = []
        self._cpu_s = 0.0
        self.events: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Run all faults. Returns the figures."""
        arguments = self._arguments
        phases = [int(n) for n in arguments.hubs.split(",")]
        begin_s = time.monotonic()
        self._join(phases[0])
        jobs = [
            FaultyJob(n, arguments.ranks, self._rng, is_healthy=n % 4 == 3, begin_ns=time.time_ns())
            for n in range(arguments.clusters)
        ]
        token = self._servers.token("ingest")
        self._senders = Senders([hub.grpc_port for hub in self._hubs], token, jobs)
        try:
            self._until_acknowledged([job.name for job in jobs], time.monotonic())
            for number, n_hubs in enumerate(phases):
                if number:
                    self._join(n_hubs)
                    time.sleep(arguments.calm_s)
                self._phase(n_hubs, n_kills=_part(arguments.kills, number, len(phases)))
        finally:
            self._senders.stop()
        n_new = self._senders.resend_all()
        time.sleep(SETTLE_S)
        figures = self._figures(jobs)
        return {
            "minutes": round((time.monotonic() - begin_s) / 60, 1),
            **figures,
            "resent_batches_stored_again": n_new,
            "faults": self.events,
            "cpu_s_of_hubs": round(self._cpu_s + sum(hub.cpu_s() for hub in self._hubs), 1),
            "cpu_s_of_servers": {name: round(s, 1) for name, s in self._servers.cpu_s().items()},
        }

    def _join(self, n_hubs: int) -> None:
        for number in range(len(self._hubs), n_hubs):
            hub = HubProcess(
                number,
                self._servers,
                lease_s=self._arguments.lease_s,
                skew_s=SKEW_S[number % len(SKEW_S)],
                limits={"seal_after_s": SEAL_AFTER_S},
                object_bytes=OBJECT_BYTES,
            )
            hub.start()
            self._stack.callback(hub.stop)
            self._hubs.append(hub)
            if hasattr(self, "_senders"):
                self._senders.add_hub(hub.grpc_port)

    def _phase(self, n_hubs: int, *, n_kills: int) -> None:
        wanted = self._arguments.faults.split(",")
        faults = [fault for fault in wanted if fault != "kill"] + ["kill"] * n_kills * ("kill" in wanted)
        self._rng.shuffle(faults)
        for fault in faults:
            time.sleep(self._rng.uniform(0, 2 * self._arguments.calm_s))  # a random moment
            before = _waiting_for_cpu_us(), time.monotonic()
            event = {"fault": fault, "hubs": n_hubs} | _FAULTS[fault](self)
            after = _waiting_for_cpu_us(), time.monotonic()
            event["cpu_pressure_percent"] = round((after[0] - before[0]) / (after[1] - before[1]) / 1e4)
            self.events.append(event)
            print(json.dumps(event), file=sys.stderr, flush=True)

    def kill(self) -> dict[str, Any]:
        """Kill a hub; start it again at once or after the takeover."""
        hub, clusters = self._owner()
        self._cpu_s += hub.cpu_s()
        begin_s = time.monotonic()
        hub.kill()
        is_at_once = self._rng.random() < 0.5
        if is_at_once:
            hub.launch()
        takeover_s = self._until_acknowledged(clusters, begin_s)
        if not is_at_once:
            hub.launch()
        hub.wait_ready()
        return {"clusters": len(clusters), "is_restarted_at_once": is_at_once, "takeover_s": takeover_s}

    def stop(self) -> dict[str, Any]:
        """Stop a hub for longer than its lease."""
        hub, clusters = self._owner()
        assert hub.process
        begin_s = time.monotonic()
        hub.process.send_signal(signal.SIGSTOP)
        takeover_s = self._until_acknowledged(clusters, begin_s)
        stopped_s = self._arguments.lease_s + self._rng.uniform(3, 10)
        time.sleep(max(0.0, begin_s + stopped_s - time.monotonic()))
        hub.process.send_signal(signal.SIGCONT)
        return {
            "clusters": len(clusters),
            "stopped_s": round(time.monotonic() - begin_s, 1),
            "takeover_s": takeover_s,
        }

    def postgres(self) -> dict[str, Any]:
        """Kill PostgreSQL, and start it again after some seconds."""
        self._servers.postgres.kill()
        time.sleep(self._arguments.postgres_s)
        self._servers.postgres.start()
        begin_s = time.monotonic()
        return {"away_s": self._arguments.postgres_s, "acknowledged_again_after_s": self._all_again(begin_s)}

    def bucket(self) -> dict[str, Any]:
        """Stop the S3 server, and start it again. Rows are acknowledged in that time."""
        begin_s = time.monotonic()
        self._servers.s3.stop()
        time.sleep(self._arguments.bucket_s)
        gap_s = self._longest_gap_s(begin_s)
        self._servers.s3.start()
        return {"away_s": self._arguments.bucket_s, "longest_time_without_acknowledgement_s": gap_s}

    def _all_again(self, since_s: float) -> float | None:
        return self._until_acknowledged([job.name for job in self._senders.jobs], since_s)

    def _longest_gap_s(self, since_s: float) -> float:
        now_s = time.monotonic()
        gaps = [0.0]
        for job in self._senders.jobs:
            with self._senders.ledger.lock:
                times = [each for each in self._senders.ledger.times_s[job.name] if each > since_s]
            points = [since_s, *times, now_s]
            gaps += [after - before for before, after in itertools.pairwise(points)]
        return round(max(gaps), 1)

    def _owner(self) -> tuple[HubProcess, list[str]]:
        """A random hub that owns slots of jobs, and these jobs."""
        of_hub = [(hub, self._clusters_of(hub)) for hub in self._hubs]
        return self._rng.choice([each for each in of_hub if each[1]] or of_hub)

    def _clusters_of(self, hub: HubProcess) -> list[str]:
        """The jobs whose slots the hub owns."""
        import psycopg

        with psycopg.connect(self._servers.dsn) as db:
            rows = db.execute("SELECT slot FROM stallscope.leases WHERE owner LIKE %s", [hub.owner_pattern])
            slots = {slot for (slot,) in rows.fetchall()}
        names = [job.name for job in self._senders.jobs]
        return [name for name in names if slot_of("default", name) in slots]

    def _until_acknowledged(self, clusters: list[str], since_s: float) -> float | None:
        """Wait until each job was acknowledged after a moment. Returns the longest time; None if one was not."""
        while time.monotonic() < since_s + _GIVE_UP_S:
            self._senders.check()
            each = [self._senders.ledger.first_after_s(name, since_s) for name in clusters]
            if None not in each:
                return round(max((s for s in each if s is not None), default=0.0), 1)
            time.sleep(0.1)
        return None

    def _figures(self, jobs: list[FaultyJob]) -> dict[str, Any]:
        rows, verdicts = stored_rows(self._servers, self._folder / "check")
        ledger = self._senders.ledger
        n_acknowledged = sum(ledger.rows.values())
        takeovers = [event["takeover_s"] for event in self.events if event.get("clusters")]
        limit_s = self._arguments.lease_s + MAX_OVER_LEASE_S
        known = [s for s in takeovers if s is not None]
        return {
            "hubs": self._arguments.hubs,
            "lease_s": self._arguments.lease_s,
            "clock_skew_s": SKEW_S,
            "seal_after_s": SEAL_AFTER_S,
            "journal_object_bytes": OBJECT_BYTES,
            "clusters": len(jobs),
            "ranks": self._arguments.ranks,
            "acknowledged_rows": n_acknowledged,
            "stored_rows": sum(rows.values()),
            "lost_rows": n_acknowledged - len(rows),
            "rows_twice": sum(n - 1 for n in rows.values()),
            "batches": len(self._senders.bodies),
            "batches_sent_to_two_hubs_at_once": ledger.n_to_two_hubs,
            "retries": ledger.n_retries,
            **verdict_figures(
                jobs, verdicts, now_ns=time.time_ns(), min_s=MIN_PERIOD_S, max_open_s=MAX_OPEN_S
            ),
            "kills": len([event for event in self.events if event["fault"] == "kill"]),
            "takeover_s": {
                "median": round(statistics.median(known), 1) if known else None,
                "max": max(known) if known else None,
                "limit": limit_s,
                "over_the_limit": sum(s is None or s > limit_s for s in takeovers),
            },
        }


_FAULTS: dict[str, Callable[[Proof], dict[str, Any]]] = {
    "kill": Proof.kill,
    "stop": Proof.stop,
    "postgres": Proof.postgres,
    "bucket": Proof.bucket,
}


def _waiting_for_cpu_us() -> int:
    """The time in which some process of this machine was ready to run and had no processor."""
    return int(Path("/proc/pressure/cpu").read_text().partition("total=")[2].split()[0])


def _part(n: int, number: int, n_parts: int) -> int:
    return n // n_parts + (number < n % n_parts)


def problems(figures: dict[str, Any]) -> list[str]:
    """The figures that must be 0 or empty, and are not."""
    names = ("lost_rows", "rows_twice", "resent_batches_stored_again", "lost_verdicts")
    names += ("verdicts_without_a_fault", "faults_with_several_verdicts", "verdicts_open_after_their_fault")
    out = [f"{name}: {figures[name]}" for name in names if figures[name]]
    if n := figures["takeover_s"]["over_the_limit"]:
        out.append(f"takeovers over the limit: {n}")
    out += [
        f"rows are not acknowledged {_GIVE_UP_S:g} s after PostgreSQL returned"
        for event in figures["faults"]
        if event.get("acknowledged_again_after_s", 0.0) is None
    ]
    return out


def main() -> None:
    """Run and report; the exit code is 1 if a figure that must be 0 is not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hubs", default="2,4", help="the number of hubs in each phase")
    parser.add_argument("--faults", default="kill,stop,postgres,bucket")
    parser.add_argument("--kills", type=int, default=20, help="over all phases; the length follows from it")
    parser.add_argument("--clusters", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--postgres-s", type=float, default=5.0)
    parser.add_argument("--bucket-s", type=float, default=30.0)
    parser.add_argument("--calm-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-result", action="store_true", help="do not write bench/results")
    parser.add_argument("--logs", type=Path, help="copy the logs of the hubs into this folder")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the servers end as well
    with ExitStack() as stack:
        proof = Proof(arguments, stack)
        if arguments.logs:
            stack.callback(_copy_logs, proof, arguments.logs)
        figures = proof.run()
    if arguments.no_result:
        print(json.dumps(figures, indent=2))
    else:
        report("prove_shared", figures)
    found = problems(figures)
    print(*found, sep="\n", file=sys.stderr)
    sys.exit(bool(found))


def _copy_logs(proof: Proof, folder: Path) -> None:
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    for log in proof._folder.glob("hub*.log"):
        shutil.copy(log, folder)


if __name__ == "__main__":
    main()
