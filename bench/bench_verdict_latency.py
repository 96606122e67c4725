"""From a late rank's arrival to the verdict at the hub, with everything between them real.

Two machines (network namespaces, the second with a wrong clock), two emulated ranks and an agent on each, one hub with
TLS. The begin is the third late arrival, by the rank's own clock; the end is the first answer of the hub's API that
names a rank, asked for on one connection every 0.1 s. Needs root, gcc, iproute2 and the built BPF programs.
"""

import contextlib
import csv
import json
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

from report import report

from stallscope.demo import live_demo
from stallscope.demo.machines import Network, Report, network, traced_job
from stallscope.serve.tls import Files, self_signed
from stallscope.serve.tokens import FILE_NAME, Tokens, bearer

COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")
FAULTS = ("sleep", "disk", "lock")
REPEATS = 3
CLOCKS = ((0, 0.0), (3_000_000_000, 120.0))
MAX_S = 60.0
N_LATE = 3
ASK_EVERY_S = 0.1
QUESTION = "/api/v1/tools/fleet.cluster.verdicts"


def main() -> None:
    """Measure and report."""
    runs = [one_run(fault) for fault in FAULTS for _ in range(REPEATS)]
    seconds = [run["seconds"] for run in runs]
    report(
        "verdict_latency",
        {
            "n_runs": len(runs),
            "n_right": sum(run["is_right"] for run in runs),
            "median_s": round(statistics.median(seconds), 3),
            "max_s": round(max(seconds), 3),
            "runs": runs,
        },
    )


def one_run(fault: str) -> dict[str, Any]:
    """One job with one fault: how long the verdict took, and whether it is the right one."""
    with tempfile.TemporaryDirectory(prefix="stallscope-bench-") as name, network(2) as net:
        folder = Path(name)
        tls = self_signed(folder / "tls", ["localhost", net.address])
        tokens = Tokens(folder / "hub" / FILE_NAME)
        (folder / "ingest").write_text(tokens.create(["ingest"], "default"))
        reader = tokens.create(["read"], "default")
        plan = live_demo.plan_for(fault, ranks=4, seconds=MAX_S)
        with serving(folder, tls, net) as (grpc_port, api_port):
            target = Report(hub=f"{net.address}:{grpc_port}", token_file=folder / "ingest", ca_file=tls.cert)
            with traced_job(plan, net.machines, target, folder=folder, clocks=CLOCKS) as job:
                job.go()
                row, at_ns = first_verdict(api_port, tls, reader)
                late_ns = nth_late_arrival_ns(job.folder / f"rank{plan.victim}.csv")
        wanted = live_demo.FAULTS[fault].cause
        return {
            "fault": fault,
            "seconds": round((at_ns - late_ns) / 1e9, 3),
            "rank": row["rank"],
            "cause": row["cause"],
            "is_right": row["rank"] == plan.victim and row["cause"] == wanted,
        }


@contextlib.contextmanager
def serving(folder: Path, tls: Files, net: Network) -> Iterator[tuple[int, int]]:
    """A hub as a process; its ports for gRPC and for questions."""
    words = ["--otlp-grpc", f"{net.address}:0", "--otlp-http", "127.0.0.1:0", "--api", "127.0.0.1:0"]
    words += ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    process = subprocess.Popen(
        [*COMMAND, "hub", "--db", str(folder / "hub"), *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "ready" in line)
        numbers = [int(word.strip(";,")) for word in line.split() if word.strip(";,").isdigit()]
        yield numbers[0], numbers[2]
    finally:
        process.terminate()
        process.wait()


def first_verdict(port: int, tls: Files, token: str) -> tuple[dict[str, Any], int]:
    """The first row that names a rank, and when it was there (monotonic ns)."""
    context = ssl.create_default_context(cafile=str(tls.cert))
    headers = {"Authorization": bearer(token), "Content-Type": "application/json"}
    end_s = time.monotonic() + MAX_S
    with contextlib.closing(HTTPSConnection("localhost", port, context=context)) as connection:
        while time.monotonic() < end_s:
            connection.request("POST", QUESTION, json.dumps({"kind": "straggler"}), headers)
            rows = [row for row in json.load(connection.getresponse())["rows"] if row["rank"] is not None]
            if rows:
                return rows[0], time.monotonic_ns()
            time.sleep(ASK_EVERY_S)
    raise SystemExit("no verdict came")


def nth_late_arrival_ns(path: Path) -> int:
    """When the rank entered the first collective of its third disturbed step, by its own clock."""
    with path.open() as file:
        late = [int(row["forward_ns"]) for row in csv.DictReader(file) if row["is_disturbed"] == "1"]
    return late[N_LATE - 1]


if __name__ == "__main__":
    main()
