"""A real hub process with a memory limit, and an honest agent next to each attack, which must lose nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hub.conftest import HubProcess
from tests.hub.test_hub import CLOCK, collectives
from tests.patience import until

from stallscope.exporters.hub_output import HubOutput, Target
from stallscope.serve.tokens import FILE_NAME, Tokens

MEMORY = 1_000_000_000
N_BATCHES, ROWS = 20, 50


@dataclass(frozen=True)
class Hub:
    """A running hub, and the tokens of its tenants: attacker and honest may send, reader and honest_reader may ask."""

    process: HubProcess
    folder: Path
    attacker: str
    honest: str
    reader: str
    honest_reader: str


@dataclass(frozen=True)
class Attacked:
    """A running hub under attack. token, reader: of the tenant that attacks; address: of the gRPC port."""

    process: HubProcess
    address: str
    token: str
    folder: Path
    reader: str = ""

    def port(self, name: str) -> tuple[str, int]:
        """The address of a port: otlp_grpc, otlp_http or api."""
        return "127.0.0.1", int(getattr(self.process.ports(), name))

    def url(self, port: str, path: str) -> str:
        """The URL of a resource at a port."""
        return f"http://127.0.0.1:{self.port(port)[1]}{path}"

    def peak_bytes(self) -> int:
        """The peak memory of the process."""
        text = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def running_process(folder: Path) -> Iterator[HubProcess]:
    """A hub process with a memory limit, until the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STALLSCOPE_HUB_MEMORY_BYTES", str(MEMORY))
        process = HubProcess(folder, "--insecure-no-tls")
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


@contextmanager
def started(folder: Path) -> Iterator[Hub]:
    """A hub with a memory limit."""
    tokens = Tokens(folder / FILE_NAME)
    attacker, honest = (tokens.create(["ingest"], tenant) for tenant in ("attacker", "honest"))
    reader, honest_reader = (tokens.create(["read", "sql"], tenant) for tenant in ("attacker", "honest"))
    with running_process(folder) as process:
        yield Hub(process, folder, attacker, honest, reader, honest_reader)


@contextmanager
def honest_agent(hub: Hub, folder: Path) -> Iterator[Attacked]:
    """The hub under attack; at the end an honest agent sends rows, and all of them must arrive."""
    address = f"127.0.0.1:{hub.process.ports().otlp_grpc}"
    node = f"n{time.monotonic_ns()}"
    target = Target(address=address, node=node, cluster="c", token=lambda: hub.honest, insecure=True)
    line = HubOutput.open(target, folder / "spool", max_spool_bytes=10**8)
    yield Attacked(hub.process, address, hub.attacker, hub.folder, hub.reader)
    for number in range(N_BATCHES):
        line.offer({"collectives": collectives(ROWS, number * ROWS)}, clock=CLOCK)
        time.sleep(0.02)
    until(lambda: not list((folder / "spool").glob("*.batch")), state=line.status)
    line.close()
    assert not list((folder / "spool").rglob("*.batch")), line.status()
    assert "dropped" not in line.status() and "set aside" not in line.status()
    assert hub.process.process.poll() is None
    assert "Traceback" not in hub.process.said.read_text()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Hub]]:
    """The hub of most attacks; a new hub once an attack has ended it."""
    with ExitStack() as stack:
        hubs: list[Hub] = []

        def current() -> Hub:
            if not hubs or hubs[-1].process.process.poll() is not None:
                hubs.append(stack.enter_context(started(tmp_path_factory.mktemp("hostile") / "hub")))
            return hubs[-1]

        yield current


@pytest.fixture
def attacked(running: Callable[[], Hub], tmp_path: Path) -> Iterator[Attacked]:
    with honest_agent(running(), tmp_path) as attacked:
        yield attacked


@pytest.fixture
def attacked_alone(tmp_path: Path) -> Iterator[Attacked]:
    """A hub without earlier refusals."""
    with started(tmp_path / "hub") as hub, honest_agent(hub, tmp_path) as attacked:
        yield attacked
