"""Several machines for real: agents in network namespaces, each with a wall clock of its own, and one hub."""

import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from stallscope.demo import live_demo
from stallscope.demo.faults import FAULTS
from stallscope.demo.machines import Network, Report, network, traced_job, wall_clock
from stallscope.serve.tokens import FILE_NAME, Tokens, bearer

from ..patience import until
from .conftest import HubProcess

SECONDS = 60.0
"""The job is ended when the answer is there: this is only the most it may take."""

CLOCKS = ((0, 0.0), (3_000_000_000, 120.0))
"""The second machine's wall clock is 3 s ahead and gains 120 us a second, which no NTP would leave so."""


@pytest.fixture
def two_machines() -> Iterator[Network]:
    if not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("no iproute2 or nsenter: no network namespaces")
    with network(2) as result:
        yield result


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_rank_on_another_machine_is_named_with_its_cause_while_the_job_runs(
    two_machines: Network,
    hub_process: Callable[..., HubProcess],
    tmp_path: Path,
    ca: trustme.CA,
    ca_file: Path,
):
    folder = tmp_path / "h"
    made = ca.issue_cert(two_machines.address, "127.0.0.1")
    cert, key = tmp_path / "hub.crt", tmp_path / "hub.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    os.close(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600))
    key.write_bytes(made.private_key_pem.bytes())
    tokens = Tokens(folder / FILE_NAME)
    (tmp_path / "ingest").write_text(tokens.create(["ingest"], "default"))
    process = hub_process(folder, "--tls-cert", cert, "--tls-key", key, grpc=f"{two_machines.address}:0")
    ports = process.ports()
    context = ssl.create_default_context()
    ca.configure_trust(context)
    plan = live_demo.plan_for("sleep", ranks=4, seconds=SECONDS)
    here = two_machines.machines
    asking = httpx.Client(
        verify=context,
        base_url=f"https://127.0.0.1:{ports.api}",
        headers={"Authorization": bearer(tokens.create(["read"], "default"))},
    )
    report = Report(
        hub=f"{two_machines.address}:{ports.otlp_grpc}", token_file=tmp_path / "ingest", ca_file=ca_file
    )
    with (
        asking as client,
        traced_job(plan, here, report, folder=tmp_path, clocks=CLOCKS) as job,
    ):
        own = Path("/proc/self/ns/net").readlink()
        assert len({own, *(Path(f"/proc/{pid}/ns/net").readlink() for pid in job.pids)}) == 3
        job.go()

        def stragglers() -> list[dict[str, Any]]:
            answer = client.post("/api/v1/tools/fleet.cluster.verdicts", json={"kind": "straggler"})
            assert answer.status_code == 200, answer.text
            return answer.json()["rows"]

        tmp_paths = [tmp_path / f"{machine.name}.said" for machine in here]
        result = until(stragglers, state=lambda: [path.read_text()[-300:] for path in tmp_paths])[0]
        assert all(entry.poll() is None for entry in job.processes)
    assert (result["rank"], result["node"], result["state"]) == (plan.victim, here[1].name, "open")
    assert result["cause"] == FAULTS["sleep"].cause
    assert result["cluster"] == "machines"


def test_a_simulated_clock_has_the_given_offset_and_drift():
    now = [10_000_000_000]
    clock = wall_clock(5_000, 100.0, true_ns=lambda: now[0])
    assert clock() == 10_000_005_000
    now[0] += 1_000_000_000
    assert clock() == 11_000_005_000 + 100_000
