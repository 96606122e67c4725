"""The counts of the status line, and its form on a terminal and elsewhere."""

import io
import os
from contextlib import suppress

import numpy as np
import pytest

from stallscope.capture.process.status import RecordCounts, StatusLine, status_line
from stallscope.events import layout
from stallscope.events.names import Op


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def collectives(comm_hash: int, seqs: list[int], op: Op = Op.ALL_REDUCE) -> layout.Array:
    rows = layout.empty(layout.COLLECTIVES, len(seqs))
    rows["comm_hash"], rows["seq"], rows["op"] = np.uint64(comm_hash), seqs, op
    return rows


def test_rounds_are_counted_once_whatever_the_number_of_ranks():
    tally = RecordCounts()
    tally.add_rounds(collectives(1 << 63, [5, 5, 6, 6]))
    tally.add_rounds(collectives(1 << 63, [7, 7, 4]))
    tally.add_rounds(collectives(2, [0, 1]))
    tally.add_rounds(collectives(3, [0, 1, 2], Op.SEND))
    tally.add_rounds(collectives(4, [-1]))
    assert (tally.n_communicators, tally.n_rounds) == (2, 4 + 2)


def test_the_status_line_counts_each_kind_of_record():
    tally = RecordCounts(n_processes=1, n_lost=0)
    tally.add([collectives(1, [0, 1]), collectives(1, list(range(1500)))])
    tally.add_rounds(collectives(1, [0]))
    assert status_line(tally) == "1 process, 1 communicator, 1 round, 1,502 records, 0 lost"


def test_a_file_gets_line_after_line():
    out = io.StringIO()
    status = StatusLine(out)
    for text in ("a", "b"):
        status.show(text)
    status.note("c")
    status.close()
    assert out.getvalue() == "a\nb\nc\n"


def test_a_terminal_gets_one_line_that_changes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    status = StatusLine(out)
    status.show("a")
    status.show("b")
    status.note("c")
    status.show("d")
    status.close()
    assert out.getvalue() == "\r\x1b[Ka\r\x1b[Kb\r\x1b[Kc\n\r\x1b[Kd\n"


def test_a_narrow_terminal_gets_notes_that_break_between_words_and_a_status_of_one_row(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    status = StatusLine(out)
    status.note("the trace is kept as another file")
    status.show("4 processes, 1 communicator")
    assert out.getvalue() == "the trace is kept as\nanother file\n\r\x1b[K4 processes, 1 commu"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_a_cursor_gets_line_after_line(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    out = Terminal()
    status = StatusLine(out)
    status.show("a")
    status.note("b")
    status.close()
    assert out.getvalue() == "a\nb\n"


def test_a_closed_pipe_ends_only_the_status_output():
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as out:
        status = StatusLine(out)
        status.show("a")
        status.note("b")
        status.close()
