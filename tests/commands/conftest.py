"""What the tests of commands need: the command run in this process, and a trace to run it on."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stallscope.cli import main
from stallscope.store import node

from ..diagnose.builders import MS, dp_trace, every


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process, without settings of this machine; gives exit code, output and errors."""
    for name in list(os.environ):
        if name.startswith("STALLSCOPE_"):
            monkeypatch.delenv(name)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stallscope", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return call


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 4 ranks, of which rank 2 sleeps 50 ms every 7 steps."""
    path = tmp_path_factory.mktemp("commands") / "trace.db"
    node.write(path, dp_trace(every(2, 7, 50 * MS)))
    return path
