"""A hub that is killed between the raise and the end of an incident, while its receiver fails, sends each once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.alerts.receiving import Received, receiving
from tests.patience import until

from stallscope.alerts.state import AlertState, state_path

PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def hub(folder: Path, received: Received, state: str) -> Iterator[None]:
    """A hub that stores the incident in this state; it is killed at the end of the with block."""
    command = [sys.executable, "-m", "tests.alerts.killed_hub", str(folder), received.url, state]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def recorded(folder: Path) -> list[str]:
    """The deliveries that the state file records."""
    path = state_path(folder) if folder.is_dir() else folder
    if not path.exists():
        return []
    with closing(AlertState(path)) as state:
        return [alert["delivered"] for alert in state.listed()]


@pytest.mark.prove
def test_killed_hub_sends_one_alert_with_one_end(tmp_path: Path):
    folder = tmp_path / "hub"
    with receiving() as received:
        received.fail = (500, {})
        with hub(folder, received, "open"):
            until(lambda: received.n_failed, seconds=PATIENCE_S)
        received.fail = (429, {"Retry-After": "1"})  # killed before the receiver has accepted the alert
        with hub(folder, received, "open"):
            until(lambda: received.n_failed > 1, seconds=PATIENCE_S)
            received.fail = None
            until(lambda: recorded(folder) == ["raised"], seconds=PATIENCE_S)
        with hub(folder, received, "closed"):
            until(lambda: recorded(folder) == ["resolved"], seconds=PATIENCE_S)
        kinds = [body["type"].rpartition(".")[2] for _, body in received.requests]
        keys = {body["subject"] for _, body in received.requests}
    assert [kind for kind in kinds if kind != "updated"] == ["raised", "resolved"]
    assert len(keys) == 1
