"""Three machines as network namespaces, asked by the command: one is down, one has a clock that is ahead."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from stallscope.serve.node_files import NodeFiles, prepare_tls, prepare_token
from stallscope.store import node as store

from ..query.fleet import VICTIM, job_trace, part

pytestmark = [pytest.mark.bpf, pytest.mark.live]

N_NODES = 3
AHEAD_NS = 80_000_000
PORT = 8443
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("STALLSCOPE_")} | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
}
SERVE = f"""
import sys, time
from pathlib import Path
from stallscope.serve import node_api as api
db, address, name, files, ahead_ns = sys.argv[1:]
clocks = api.Clocks(
    monotonic_ns=lambda: time.monotonic_ns() + int(ahead_ns), wall_ns=lambda: time.time_ns() + int(ahead_ns)
)
options = api.Options(
    db=Path(db), listen=f"{{address}}:{PORT}", node=name, files=Path(files), clocks=clocks
)
api.serve(options, announce=lambda text: print(text, flush=True))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of each machine; this machine reaches them over a bridge."""
    if not shutil.which("ip"):
        pytest.skip("no ip to make network namespaces with (Debian package iproute2)")
    tag = f"ss{os.getpid() % 100_000}"
    third = os.getpid() % 250
    made = [(f"{tag}-{i}", f"10.213.{third}.{i + 1}") for i in range(N_NODES)]
    with ExitStack() as stack:
        ip("link", "add", tag, "type", "bridge")
        stack.callback(ip, "link", "del", tag)
        ip("addr", "add", f"10.213.{third}.254/24", "dev", tag)
        ip("link", "set", tag, "up")
        for i, (name, address) in enumerate(made):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{tag}v{i}", "master", tag, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield made


@pytest.fixture(scope="module")
def fleet(machines, tmp_path_factory) -> Iterator[tuple[Path, list[str]]]:
    """Agents' APIs on all machines, then the last machine is cut off: the folder, and their addresses."""
    folder = tmp_path_factory.mktemp("fleet")
    trace = job_trace()
    seed = NodeFiles(folder / "api")
    prepare_tls(seed, [])
    prepare_token(seed)
    servers: list[subprocess.Popen[str]] = []
    try:
        for i, (name, address) in enumerate(machines):
            store.write(folder / f"{i}.db", part(trace, i))
            own = folder / f"api-{i}"
            own.mkdir(mode=0o700)
            for shared in ("ca.crt", "ca.key", "tokens.json"):
                shutil.copy(seed.folder / shared, own / shared)
            words = [str(folder / f"{i}.db"), address, trace.nodes[i], str(own)]
            command = ["ip", "netns", "exec", name, sys.executable, "-c", SERVE, *words]
            ahead = AHEAD_NS if i == 1 else 0
            servers.append(
                subprocess.Popen([*command, str(ahead)], stdout=-1, stderr=-1, text=True, env=ENVIRONMENT)
            )
        for server in servers:
            assert server.stdout.readline().startswith("serving"), server.stderr.read()
        ip("-n", machines[-1][0], "link", "set", "eth0", "down")
        yield folder, [f"{address}:{PORT}" for _, address in machines]
    finally:
        for server in servers:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.communicate(timeout=10)
            server.kill()
            server.wait()


def command(fleet: tuple[Path, list[str]], *words: str) -> subprocess.CompletedProcess[str]:
    folder, addresses = fleet
    api = folder / "api"
    given = [
        "--nodes",
        ",".join(addresses),
        "--token-file",
        str(api / "token"),
        "--ca-cert",
        str(api / "ca.crt"),
    ]
    return subprocess.run(
        [sys.executable, "-c", "from stallscope.cli import main; main()", *words, *given, "--timeout", "4s"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
    )


def test_a_fleet_query_reports_the_missing_node_and_the_clock_offset(fleet):
    done = command(
        fleet, "query", "SELECT node, count(*) AS n FROM collectives GROUP BY node ORDER BY 1", "--json"
    )
    assert done.returncode == 22, done.stderr
    answer = json.loads(done.stdout)
    assert [row["node"] for row in answer["rows"]] == ["node0000", "node0001"]
    assert len(answer["missing"]) == 1
    assert f"{fleet[1][2]} is missing: " in done.stderr
    match = re.search(
        rf"clock of node0001 \({fleet[1][1]}\) is ([\d.]+) ms ahead of .* \(± ([\d.]+) ms\)", done.stderr
    )
    assert match, done.stderr
    assert abs(float(match[1]) - AHEAD_NS / 1e6) <= float(match[2]) + 0.1
    assert "clock of node0000 is" not in done.stderr


def test_the_late_rank_is_explained_over_the_network(fleet):
    done = command(fleet, "explain", "--json")
    assert done.returncode == 22, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert (verdict["ranks"], verdict["nodes"]) == ([VICTIM], ["node0001"])
    assert "is missing" in done.stderr


def test_the_timeline_of_all_is_exported(fleet, tmp_path):
    out = tmp_path / "job.json"
    done = command(fleet, "export", "--format", "chrome", "--out", str(out))
    assert done.returncode == 22, done.stderr
    assert {"node0000", "node0001"} <= {
        word for word in ("node0000", "node0001", "node0002") if word in out.read_text()
    }
