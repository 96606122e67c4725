"""A hub whose disk is full or whose token file is damaged, while an honest agent sends: no row may be lost."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.hub.test_hub import CLOCK, collectives
from tests.memory_disk import memory_disk
from tests.patience import until

from stallscope.exporters.hub_output import HubOutput, Target
from stallscope.serve.tokens import FILE_NAME

from .conftest import Hub, started

pytestmark = pytest.mark.live

ROWS = 50


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    with memory_disk(tmp_path / "disk", size="24m") as disk:
        yield disk


def fill(disk: Path) -> Callable[[], None]:
    """Fill a file system to its last byte. Returns a function that frees the space."""
    path = disk / "other"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path.unlink


def damage_tokens(disk: Path) -> Callable[[], None]:
    """Give a token in the file an id of another type."""
    path = disk / "hub" / FILE_NAME
    content = path.read_bytes()
    path.write_text('{"format": 1, "tokens": [{"id": []}]}')

    def repair() -> None:
        path.write_bytes(content)

    return repair


def n_stored(hub: Hub) -> int:
    answer = httpx.post(
        f"http://127.0.0.1:{hub.process.ports().api}/api/v1/sql",
        json={"sql": "SELECT count(*) FROM collectives"},
        headers={"Authorization": f"Bearer {hub.honest_reader}"},
    )
    return int(answer.json()["rows"][0][0])


def test_an_agent_loses_nothing_while_the_folder_cannot_be_used(small_disk: Path, tmp_path: Path):
    with started(small_disk / "hub") as hub:
        address = f"127.0.0.1:{hub.process.ports().otlp_grpc}"
        target = Target(address=address, node="n", cluster="c", token=lambda: hub.honest, insecure=True)
        line = HubOutput.open(target, tmp_path / "spool", max_spool_bytes=10**8)
        n_batches = 0
        for damage in fill, damage_tokens:
            repair = damage(small_disk)
            while not line.complaint():  # a damaged token file has an effect after a second
                line.offer({"collectives": collectives(ROWS, n_batches * ROWS)}, clock=CLOCK)
                n_batches += 1
                time.sleep(0.05)
            repair()
            until(
                lambda: not line.complaint() and not list((tmp_path / "spool").glob("*.batch")),
                state=line.status,
            )
        line.close()
        assert "dropped" not in line.status() and "set aside" not in line.status()
        until(lambda: n_stored(hub) == n_batches * ROWS)
        assert hub.process.process.poll() is None
        assert "Traceback" not in hub.process.said.read_text()
