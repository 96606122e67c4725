"""The status line that lists, once a second, the traced processes, communicators and records."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np

from stallscope.events.counted import counted
from stallscope.events.layout import Array
from stallscope.events.names import P2P_OPS
from stallscope.terminal_text import columns_of, fitted

_CLEAR_LINE = "\r\x1b[K"


@dataclass
class RecordCounts:
    """The records captured so far."""

    n_processes: int = 0
    n_records: int = 0
    n_lost: int = 0
    _rounds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, tables: Iterable[Array]) -> None:
        """Count the records of one batch."""
        self.n_records += sum(map(len, tables))

    def add_rounds(self, collectives: Array) -> None:
        """Follow the first and last round of each communicator; sends and receives are not rounds."""
        is_round = collectives["seq"] >= 0
        for op in P2P_OPS:
            is_round &= collectives["op"] != op
        comms, seqs = collectives["comm_hash"][is_round], collectives["seq"][is_round]
        for comm_hash in np.unique(comms).tolist():
            seq = seqs[comms == comm_hash]
            first, last = self._rounds.get(comm_hash, (int(seq.min()), -1))
            self._rounds[comm_hash] = (min(first, int(seq.min())), max(last, int(seq.max())))

    @property
    def n_communicators(self) -> int:
        """Communicators with at least one collective."""
        return len(self._rounds)

    @property
    def n_rounds(self) -> int:
        """Rounds of all communicators."""
        return sum(last - first + 1 for first, last in self._rounds.values())


def status_line(counts: RecordCounts) -> str:
    """The status in one line."""
    return (
        f"{counted(counts.n_processes, 'process', 'processes')}, "
        f"{counted(counts.n_communicators, 'communicator')}, "
        f"{counted(counts.n_rounds, 'round')}, {counted(counts.n_records, 'record')}, {counts.n_lost:,} lost"
    )


class StatusLine:
    """Rewrites one line on a terminal; writes line after line anywhere else, and on a terminal without a cursor.

    If the output is no longer read (a closed pipe or terminal), it stops writing and the trace continues.
    """

    def __init__(self, out: TextIO, *, notes_only: bool = False):
        self._out = out
        self._notes_only = notes_only
        self._is_terminal = out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._is_open = False

    def show(self, text: str) -> None:
        """Replace the status; with notes_only nothing."""
        if self._notes_only:
            return
        # A longer line would continue on the next row, and only that row would be rewritten.
        self._write(f"{_CLEAR_LINE}{text[: columns_of(self._out)]}" if self._is_terminal else f"{text}\n")
        self._is_open = self._is_terminal

    def note(self, text: str) -> None:
        """Print a line that stays; on a terminal it breaks between words."""
        if width := columns_of(self._out):
            text = fitted(text, width)
        self._write(f"{_CLEAR_LINE if self._is_open else ''}{text}\n")
        self._is_open = False

    def close(self) -> None:
        """Leave the last status on the screen."""
        if self._is_open:
            self._write("\n")
            self._is_open = False

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()
