"""Hubs to test against: in this process, or started as a user would."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from stallscope import hub
from stallscope.serve.tls import Files
from stallscope.serve.tokens import FILE_NAME, Tokens
from stallscope.settings import Settings

from ..patience import PATIENCE_S

COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(ca: trustme.CA, tmp_path: Path) -> Files:
    """Certificate and key of a hub on this machine."""
    made = ca.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "hub.crt", tmp_path / "hub.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(made.private_key_pem.bytes())
    return Files(cert, key)


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> Path:
    """The authority, as agents are given it."""
    path = tmp_path / "ca.crt"
    ca.cert_pem.write_to_path(path)
    return path


@dataclass(frozen=True)
class Served:
    """A hub in this process."""

    folder: Path
    ports: hub.Ports
    tokens: Tokens

    def token_file(self, *scopes: str, tenant: str = "default", expires_in_s: float | None = None) -> Path:
        """A file with a new token."""
        path = self.folder / f"{'-'.join(scopes)}-{tenant}-{time.monotonic_ns()}.token"
        path.write_text(self.tokens.create(scopes, tenant, expires_in_s=expires_in_s))
        return path


@pytest.fixture
def served(tmp_path: Path, tls: Files) -> Iterator[Served]:
    """A hub with TLS, on ports of its own."""
    folder = tmp_path / "hub"
    local = "127.0.0.1:0"
    options = hub.Options(
        db=folder, otlp_grpc=local, otlp_http=local, api=local, tls=tls, settings=Settings()
    )
    with (tmp_path / "said").open("w") as out, hub.started(options, out=out) as ports:
        yield Served(folder, ports, Tokens(folder / FILE_NAME))


class HubProcess:
    """A running `stallscope hub`: its process and its output."""

    def __init__(self, folder: Path, *arguments: str, grpc: str = "127.0.0.1:0"):
        self.said = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.said")
        local = ("--otlp-grpc", grpc, "--otlp-http", "127.0.0.1:0", "--api", "127.0.0.1:0")
        command = [*COMMAND, "hub", "--db", str(folder), *local, *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.said.open("w") as out:
            self.process = subprocess.Popen(command, stdin=-3, stdout=out, stderr=out, env=environment)

    def ports(self) -> hub.Ports:
        """Wait until it is ready; its ports."""
        end_s = time.monotonic() + PATIENCE_S
        output = r"ready: OTLP over gRPC at port (\d+), over HTTP at (\d+); https? API at (\d+)"
        while not (match := re.search(output, self.said.read_text())):
            assert self.process.poll() is None and time.monotonic() < end_s, self.said.read_text()
            time.sleep(0.02)
        return hub.Ports(*map(int, match.groups()))

    def ended(self, number: int = 0) -> int:
        """Its exit code, after a signal if one is given."""
        if number:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def hub_process() -> Iterator[Callable[..., HubProcess]]:
    """Starts hubs; none is left at the end."""
    running: list[HubProcess] = []

    def start(*arguments: object, **more: str) -> HubProcess:
        folder, *words = arguments
        running.append(HubProcess(Path(str(folder)), *map(str, words), **more))
        return running[-1]

    yield start
    for entry in running:
        if entry.process.poll() is None:
            entry.process.send_signal(signal.SIGKILL)
            entry.process.wait()
