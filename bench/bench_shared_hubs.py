"""Throughput with diagnosis of two and four hub processes, relative to one, and the processor time of each part.

One, two and four hubs by turns, each time with a new database and an empty bucket. Each hub and its processes have one
processor, so that a hub process stands for a core. Several jobs, each with a straggler and as many for each hub, send
the same number of rows, as fast as the hubs examine them: a job waits while too many acknowledged rows are unexamined.
The load generator, PostgreSQL and the bucket server share the processors, so the result also has the CPU seconds of
each part, and the ratio that follows from them for a machine with a processor for each hub.

    python bench/bench_shared_hubs.py [--rounds N] [--rows N] [--hubs 1,2,4]
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from report import report
from shared_hubs import HubProcess, Servers, servers

from stallscope.exporters import hub_arrow
from stallscope.store.shared.slots import N_SLOTS, slot_of
from stallscope.stress import load

CLUSTERS, RANKS, ROUNDS_A_BATCH = 16, 64, 80
INTERVAL_NS, LATE_NS, STRAGGLER = 20_000_000, 3_000_000, 3
MAX_UNEXAMINED = 300_000
"""Rows of all jobs: below the rows from which a hub samples a job."""
LIMITS = {"seal_rows": 20_000, "settle_s": 1.0}
"""The rows that are sealed depend hardly on the duration of a run, in which more hubs need less time."""
_METHOD = "/stallscope.v1.Ingest/Append"
_LOOK_S = 0.25
_MAX_S, _TOKEN_S = 400.0, 30.0


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_500_000)
    parser.add_argument("--hubs", default="1,2,4")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for n_hubs in map(int, arguments.hubs.split(",")):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
                folder.chmod(0o755)
                runs.append(measured(stack.enter_context(servers(folder)), n_hubs, arguments.rows, stack))
                print(runs[-1], file=sys.stderr, flush=True)
    report("shared_hubs", figures(runs))


def measured(of: Servers, n_hubs: int, n_wanted: int, stack: ExitStack) -> dict[str, Any]:
    """One run."""
    n_cpus = os.cpu_count() or 1
    hubs = [HubProcess(number, of, limits=LIMITS, cpu=number % n_cpus) for number in range(n_hubs)]
    for hub in hubs:
        hub.start()
        stack.callback(hub.stop)
    token, reader = of.token("ingest"), of.token("admin")
    names = _names(_wait_for_shares(of, n_hubs))
    _wait_for_token(hubs, reader)
    bodies = [_bodies(name, n_wanted // CLUSTERS) for name in names]

    def n_done() -> float:
        numbers = [_numbers(hub, reader) for hub in hubs]
        return sum(each["diagnosis_rows"] + each["diagnosis_rows_left_out"] for each in numbers)

    before_bytes, before, main_s = _journal_bytes(of), _cpu(of, hubs), _main_cpu_s(hubs)
    begin_s = time.monotonic()
    n_rows = _send(hubs, token, bodies, n_done)
    while n_done() < n_rows and time.monotonic() < begin_s + _MAX_S:
        time.sleep(_LOOK_S)
    wall_s, after = time.monotonic() - begin_s, _cpu(of, hubs)
    numbers = [_numbers(hub, reader) for hub in hubs]
    return {
        "hubs": n_hubs,
        "rows": n_rows,
        "examined": round(sum(each["diagnosis_rows"] for each in numbers)),
        "left_out": round(sum(each["diagnosis_rows_left_out"] for each in numbers)),
        "seconds": round(wall_s, 1),
        "forwarded_batches": round(sum(each["forwarded_batches"] for each in numbers)),
        "cpu_s": {name: round(after[name] - before[name], 2) for name in after},
        "cpu_s_of_hubs_without_diagnosis": round(_main_cpu_s(hubs) - main_s, 2),
        "log_bytes": _journal_bytes(of) - before_bytes,
        **_stored(of, hubs),
    }


def _bodies(name: str, n_wanted: int) -> list[tuple[bytes, int]]:
    """The requests of a job and their rows."""
    job = load.Job(
        name=name, ranks=RANKS, first_rank=0, world=RANKS, interval_ns=INTERVAL_NS, straggler=STRAGGLER,
        late_ns=LATE_NS,
    )  # fmt: skip
    first = origin = load.rounds_until(job, time.time_ns())
    tables, out, n_rows = {"processes": load.processes(job, time.time_ns())}, [], 0
    while True:
        body = hub_arrow.request(tables, batch_id=f"{name}-{first}", node="n", cluster=name, about={})
        out.append((body, len(tables.get("collectives", ()))))
        n_rows += out[-1][1]
        if n_rows >= n_wanted:
            return out
        tables = {"collectives": load.collectives(job, first, ROUNDS_A_BATCH, origin_round=origin)}
        first += ROUNDS_A_BATCH


def _send(
    hubs: list[HubProcess], token: str, bodies: list[list[tuple[bytes, int]]], n_done: Callable[[], float]
) -> int:
    """Rows that were acknowledged; each job has a thread, and sends to the hubs by turns."""
    metadata = (("authorization", f"Bearer {token}"),)
    calls = [grpc.insecure_channel(f"127.0.0.1:{hub.grpc_port}").unary_unary(_METHOD) for hub in hubs]
    counts, has_room, ended = [0] * CLUSTERS, threading.Event(), threading.Event()
    has_room.set()

    def run(number: int) -> None:
        for batch, (body, n_rows) in enumerate(bodies[number]):
            has_room.wait()
            while True:
                try:
                    calls[(number + batch) % len(calls)](body, timeout=30, metadata=metadata)
                    break
                except grpc.RpcError:
                    time.sleep(0.1)
            counts[number] += n_rows

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            if sum(counts) - n_done() < MAX_UNEXAMINED:
                has_room.set()
            else:
                has_room.clear()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(CLUSTERS)]
    watcher = threading.Thread(target=watch)
    for thread in [*threads, watcher]:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    watcher.join()
    return sum(counts)


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios to one hub, and the constants for a calculation."""
    rows, numbers = sum(run["rows"] for run in runs), sorted({run["hubs"] for run in runs})
    of = {n: [run for run in runs if run["hubs"] == n] for n in numbers}

    def us_a_row(name: str, n_hubs: int) -> float:
        some = of[n_hubs]
        return round(sum(run["cpu_s"][name] for run in some) * 1e6 / sum(run["rows"] for run in some), 2)

    def rates(n_hubs: int) -> list[float]:
        return [run["examined"] / run["seconds"] for run in of[n_hubs]]

    parts, n_cpus = runs[0]["cpu_s"].keys(), os.cpu_count() or 1
    by_hubs = {}
    for n in numbers:
        cpu_us = {part: us_a_row(part, n) for part in parts}
        by_hubs[str(n)] = {
            "examined_rows_per_s": [round(rate) for rate in rates(n)],
            "ratio_to_one_hub": round(
                statistics.median(many / one for many, one in zip(rates(n), rates(numbers[0]), strict=True)),
                2,
            ),
            "cpu_us_per_row": cpu_us,
            "cpu_us_per_row_of_hubs_without_diagnosis": round(
                sum(run["cpu_s_of_hubs_without_diagnosis"] for run in of[n])
                * 1e6
                / sum(run["rows"] for run in of[n]),
                2,
            ),
            "ratio_with_a_processor_for_each_hub": round(n * us_a_row("hubs", 1) / cpu_us["hubs"], 2),
            "ratio_bound_of_this_machine": round(
                min(n, n_cpus / (sum(cpu_us.values()) / us_a_row("hubs", 1))), 2
            ),
        }
    return {
        "clusters": CLUSTERS,
        "ranks": RANKS,
        "by_hubs": by_hubs,
        "postgres_log_bytes_per_row": round(sum(run["log_bytes"] for run in runs) / rows, 1),
        "sealed_bytes_per_row": round(
            sum(run["sealed_bytes"] for run in runs) / max(1, sum(run["sealed_rows"] for run in runs)), 1
        ),
        "journal_bytes_per_row": round(
            sum(run["journal_bytes"] for run in runs) / max(1, sum(run["journal_rows"] for run in runs)), 1
        ),
        "bucket_objects_per_million_rows": round(sum(run["objects"] for run in runs) * 1e6 / rows, 1),
        "commits_per_million_rows": round(sum(run["commits"] for run in runs) * 1e6 / rows, 1),
        "runs": runs,
    }


def _cpu(of: Servers, hubs: list[HubProcess]) -> dict[str, float]:
    own = os.times()
    return {"hubs": sum(hub.cpu_s() for hub in hubs), **of.cpu_s(), "load_generator": own.user + own.system}


def _main_cpu_s(hubs: list[HubProcess]) -> float:
    return sum(hub.main_cpu_s() for hub in hubs)


def _numbers(hub: HubProcess, token: str) -> dict[str, float]:
    """The metrics without labels, by name."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{hub.api_port}/metrics", headers={"authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split() for line in lines if line.startswith("stallscope_hub_") and "{" not in line)
    return {name.removeprefix("stallscope_hub_").removesuffix("_total"): float(n) for name, n in pairs}


def _wait_for_token(hubs: list[HubProcess], token: str) -> None:
    """Wait until each hub has read the new tokens."""
    for hub in hubs:
        until_s = time.monotonic() + _TOKEN_S
        while True:
            try:
                _numbers(hub, token)
                break
            except urllib.error.HTTPError as error:
                if error.code != 401 or time.monotonic() > until_s:
                    raise
            time.sleep(_LOOK_S)


def _stored(of: Servers, hubs: list[HubProcess]) -> dict[str, int]:
    import psycopg

    with psycopg.connect(of.dsn, options="-c search_path=stallscope") as db:
        sealed = db.execute("SELECT coalesce(sum(n_rows), 0), coalesce(sum(n_bytes), 0) FROM segments")
        sealed_rows, sealed_bytes = sealed.fetchall()[0]
        journal = db.execute("SELECT coalesce(sum(n_rows), 0), coalesce(sum(n_bytes), 0) FROM journal")
        journal_rows, journal_bytes = journal.fetchall()[0]
        (commits,) = db.execute("SELECT sum(n) FROM slot_changes").fetchall()[0]
        (n_objects,) = db.execute(
            "SELECT (SELECT count(*) FROM segments) + (SELECT count(*) FROM dropped)"
            " + (SELECT count(DISTINCT object) FROM journal)"
        ).fetchall()[0]
    numbers = {"sealed_rows": sealed_rows, "sealed_bytes": sealed_bytes, "journal_rows": journal_rows}
    numbers |= {"journal_bytes": journal_bytes, "commits": commits, "objects": n_objects}
    return {name: int(n) for name, n in numbers.items()}


def _journal_bytes(of: Servers) -> int:
    """Bytes that PostgreSQL has written to its log."""
    import psycopg

    with psycopg.connect(of.dsn) as db:
        return int(db.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchall()[0][0])


def _wait_for_shares(of: Servers, n_hubs: int) -> dict[int, str]:
    """Wait until each hub owns its slots. Returns the owner of each slot."""
    import psycopg

    with psycopg.connect(of.dsn, autocommit=True) as db:
        while True:
            owners: dict[int, str] = dict(db.execute("SELECT slot, owner FROM stallscope.leases").fetchall())
            if sorted(Counter(owners.values()).values()) == n_hubs * [N_SLOTS // n_hubs]:
                return owners
            time.sleep(0.2)


def _names(owners: Mapping[int, str]) -> list[str]:
    """Names of jobs, each in a slot of its own, and the same number for each hub."""
    n_each = CLUSTERS // len(set(owners.values()))
    names: dict[int, str] = {}
    candidates = (f"c{number}" for number in itertools.count())
    while len(names) < CLUSTERS:
        name = next(candidates)
        slot = slot_of("default", name)
        if sum(owners[other] == owners[slot] for other in names) < n_each:
            names.setdefault(slot, name)
    return list(names.values())


if __name__ == "__main__":
    main()
