"""Time of one statement over several nodes, over HTTPS; the nodes' APIs are spread over four processes.

    python bench/bench_fanout.py [N_NODES ...]      (default: 4 50)

All nodes are on this machine, so with 50 nodes the result measures the machine. The start of the command, which loads
the engines that compute over all rows, is a separate number.
"""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from report import report

from stallscope.query import fanout
from stallscope.query.remote_nodes import Access
from stallscope.query.sql import Limits
from stallscope.serve.node_files import NodeFiles, prepare_tls, prepare_token
from stallscope.store import node as store
from stallscope.synth import Job, simulate

SERVE = """
import sys, threading
from pathlib import Path
from stallscope.serve import node_api as api
folder, db, *names = sys.argv[1:]
stop = threading.Event()
for name in names:
    options = api.Options(db=Path(db), listen="127.0.0.1:0", node=name, files=Path(folder) / "api")
    output = lambda text: (sys.stdout.write(text + "\\n"), sys.stdout.flush())
    threading.Thread(target=api.serve, args=(options,), kwargs={"announce": output, "stop": stop}).start()
sys.stdin.read()
stop.set()
"""
N_PROCESSES = 4
N_TIMES = 7
STATEMENTS = {
    "groups": "SELECT node, op_name(op) AS op, count(*) AS n, avg(count_bytes) FROM collectives GROUP BY 1, 2",
    "sorted": "SELECT node, ts_ns, seq FROM collectives ORDER BY ts_ns DESC LIMIT 20",
    "all": "SELECT quantile_cont(wait_leave_ns - wait_enter_ns, 0.95) FROM collectives",
}


def serve(folder: Path, names: list[str], db: Path) -> "subprocess.Popen[str]":
    """APIs over a trace, in one process that ends when its standard input does."""
    command = [sys.executable, "-c", SERVE, str(folder), str(db), *names]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(server: "subprocess.Popen[str]") -> None:
    server.communicate(timeout=60)


def measured(n_nodes: int, folder: Path) -> dict[str, object]:
    """Seconds of each statement, median of N_TIMES."""
    files = NodeFiles(folder / "api")
    prepare_tls(files, [])
    prepare_token(files)
    trace, _ = simulate(Job(dp=8, ranks_per_node=8, steps=250), seed=1, has_twin=False)
    db = folder / "trace.db"
    if not db.exists():
        store.write(db, trace)
    with ExitStack() as stack:
        names = [f"n{number}" for number in range(n_nodes)]
        shares = [names[i::N_PROCESSES] for i in range(N_PROCESSES)]
        servers = [serve(folder, share, db) for share in shares if share]
        for server in servers:
            stack.callback(ended, server)
        addresses = [
            server.stdout.readline().split("https://")[1].split()[0]  # type: ignore[union-attr]
            for server, share in zip(servers, shares, strict=False)
            for _ in share
        ]
        access = Access(token=files.token.read_text().strip(), ca=files.ca, timeout_s=60)
        out: dict[str, object] = {"n_nodes": n_nodes, "collectives_per_node": len(trace.collectives)}
        for name, statement in STATEMENTS.items():
            took = []
            for _ in range(N_TIMES + 1):
                begin_s = time.monotonic()
                rows = fanout.query(statement, addresses, access, limits=Limits(timeout_s=60))
                took.append(time.monotonic() - begin_s)
                assert not rows.failures, rows.failures
            out[f"{name}_s"] = round(median(took[1:]), 3)
        errors = [reply.clock.error_ns for reply in rows.replies]
        out["clock_error_us"] = round(median(errors) / 1e3)
        return out


def main() -> None:
    """Measure and keep in bench/results/fanout.json."""
    sizes = [int(word) for word in sys.argv[1:]] or [4, 50]
    result = []
    for n_nodes in sizes:
        with tempfile.TemporaryDirectory(prefix="stallscope-bench-") as folder:
            result.append(measured(n_nodes, Path(folder)))
    report("fanout", {"sizes": result})


if __name__ == "__main__":
    main()
