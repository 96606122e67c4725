"""The progress bar: on a terminal and for large files only, up to all bytes."""

import io
import sys
from pathlib import Path

import pytest

from stallscope.commands.progress import reading_progress
from stallscope.importers.texts import lines_of, lines_with, on_read, text_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "job.log"
    file.write_text("iteration 1\n" * 500_000)
    return file


def test_all_bytes_are_reported(log: Path):
    for read in (
        lambda: list(lines_of(log)),
        lambda: list(lines_with(log, (b"x",), bool)),
        lambda: text_of(log, 1 << 30),
    ):
        parts: list[int] = []
        token = on_read.set(parts.append)
        read()
        on_read.reset(token)
        assert log.stat().st_size - (1 << 20) <= sum(parts) <= log.stat().st_size


def test_a_terminal_shows_a_bar(log: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with reading_progress([log], min_bytes=1):
        list(lines_of(log))
    assert "reading files" in terminal.getvalue()
    assert on_read.get() is None


@pytest.mark.parametrize(("stream", "min_bytes"), [(Terminal(), 1 << 40), (io.StringIO(), 1)])
def test_small_files_and_pipes_show_no_progress_bar(
    log: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, min_bytes: int
):
    monkeypatch.setattr(sys, "stderr", stream)
    with reading_progress([log], min_bytes=min_bytes):
        list(lines_of(log))
    assert stream.getvalue() == ""
