"""Streams in a process of their own: the diagnosis uses another core than the receiver, and the hub survives its end.

The process starts with the first rows and ends with the hub's end of the socket. If it ends otherwise, the caller gets
ProcessEnded, and the next rows start a new process with new streams.

Tables travel in Arrow's stream format, directly after the message that announces them. Both ends use one block of
memory for all of them: new memory for each message would cost more than the copies.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa

from stallscope.continuous.backlog import Key
from stallscope.continuous.streams import AdvancedStream, Streams
from stallscope.diagnose import Change, Stream
from stallscope.events.layout import Array
from stallscope.store.hub import traces
from stallscope.store.hub.memory_size import return_freed_memory

_PATIENCE_S = 120.0
"""The process is killed if an answer takes longer."""

_END_S = 5.0
_RETURN_S = 5.0
"""Freed memory is returned at most this often, and when no step arrives for this time."""

_ALIGNED_BYTES = 64
_CHUNK_ROWS = 4_096
"""Tables in smaller pieces are joined first: each piece costs as much as hundreds of rows."""


class StepFailed(Exception):
    """A step of the diagnosis failed in the other process. kind: the kind of its exception."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


class ProcessEnded(StepFailed):
    """The process of the diagnosis has ended, with all its streams."""


class StreamProcess:
    """The interface of Streams, for streams in another process."""

    def __init__(self, make_stream: Callable[[], Stream]):
        """make_stream: is sent to the process, so it must be possible to pickle it."""
        self._make_stream = make_stream
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._memory = _Memory()

    @property
    def pid(self) -> int | None:
        """The number of the process, None before its start."""
        return self._process.pid if self._process else None

    def feed(
        self, key: Key, tables: Mapping[str, pa.Table], *, n_left_out: int = 0, is_behind: bool = False
    ) -> list[Change] | None:
        """See streams.Diagnoses."""
        changes: list[Change] | None = self._answer(
            "feed", tables, key, n_left_out=n_left_out, is_behind=is_behind
        )
        return changes

    def tick(self, keys: Collection[Key] | None = None) -> dict[Key, AdvancedStream]:
        """See streams.Diagnoses."""
        if self._process is None:
            return {}
        advances: dict[Key, AdvancedStream] = self._answer("tick", {}, keys)
        return advances

    def forget(self, keys: Iterable[Key]) -> None:
        """See streams.Diagnoses."""
        if self._process is not None:
            self._answer("forget", {}, list(keys))

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._pipe = None

    def _answer(self, step: str, tables: Mapping[str, pa.Table], *arguments: Any, **options: Any) -> Any:
        """The result of a step. Raises StepFailed, ProcessEnded."""
        try:
            pipe = self._pipe or self._started()
            packed, n_bytes = _packed(tables, self._memory)
            pipe.send((step, n_bytes, arguments, options))
            _send(pipe, packed)
            if not pipe.poll(_PATIENCE_S):
                raise TimeoutError
            is_good, answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise ProcessEnded(self._ended(error)) from error
        if not is_good:
            raise StepFailed(answer)
        return answer

    def _started(self) -> Connection:
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The packages and images start Python with their own path, which a child does not inherit.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._pipe = Connection(own.detach())
        self._pipe.send(self._make_stream)
        return self._pipe

    def _ended(self, error: Exception) -> str:
        """End the process and close its pipe. Returns the reason of the end."""
        process = self._process
        if process is not None:
            process.kill() if isinstance(error, TimeoutError) else None
        self.close()
        code = process.returncode if process is not None else None
        if isinstance(error, TimeoutError):
            return f"the process of the diagnosis gave no answer for {_PATIENCE_S:g} s"
        if code is not None and code < 0:
            return f"the process of the diagnosis was ended by {signal.Signals(-code).name}"
        return f"the process of the diagnosis ended with status {code}"


class _Memory:
    """A block of memory that is used again for each message."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)

    def part(self, n_bytes: int) -> Array:
        """Its first bytes; their old content is lost."""
        if n_bytes > len(self._block):
            self._block = np.empty(n_bytes + n_bytes // 4, np.uint8)
        return self._block[:n_bytes]


def _packed(tables: Mapping[str, pa.Table], memory: _Memory) -> tuple[Array, dict[str, int]]:
    """The tables, one after the other, and the bytes of each by name."""
    pieces = {name: _in_few_pieces(rows) for name, rows in traces.needed(tables).items()}
    n_bytes = {name: _n_bytes(rows) for name, rows in pieces.items()}
    block = memory.part(sum(n_bytes.values()))
    begin = 0
    for name, rows in pieces.items():
        _write(rows, pa.FixedSizeBufferWriter(pa.py_buffer(block[begin : begin + n_bytes[name]])))
        begin += n_bytes[name]
    return block, n_bytes


def _in_few_pieces(rows: pa.Table) -> pa.Table:
    n_pieces = max((column.num_chunks for column in rows.columns), default=1)
    return rows if len(rows) >= _CHUNK_ROWS * n_pieces else rows.combine_chunks()


def _n_bytes(rows: pa.Table) -> int:
    """The bytes of a table in Arrow's stream format, aligned."""
    counted = pa.MockOutputStream()
    _write(rows, counted)
    return -(-counted.size() // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _write(rows: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)


def _send(pipe: Connection, packed: Array) -> None:
    rest = packed.data
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def _received(pipe: Connection, n_bytes: Mapping[str, int], memory: _Memory) -> dict[str, pa.Table]:
    """The tables that follow a message; valid until the next tables are received."""
    block = memory.part(sum(n_bytes.values()))
    rest = block.data
    while rest:
        n_read = os.readv(pipe.fileno(), [rest])
        if not n_read:
            raise EOFError
        rest = rest[n_read:]
    tables, begin = {}, 0
    for name, n in n_bytes.items():
        tables[name] = pa.ipc.open_stream(pa.py_buffer(block[begin : begin + n])).read_all()
        begin += n
    return tables


def main() -> None:
    """Answer steps until the hub closes the pipe.

    Freed memory is returned now and then: a hub at its memory limit refuses all rows until its processes shrink.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the hub ends first, and with it the pipe
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="stallscope diagnosis: %(message)s")
    pipe, memory = Connection(int(sys.argv[1])), _Memory()
    try:
        streams = Streams(pipe.recv())
        returned_s = time.monotonic()
        while True:
            if not pipe.poll(_RETURN_S) or time.monotonic() > returned_s + _RETURN_S:
                return_freed_memory()
                returned_s = time.monotonic()
            step, n_bytes, arguments, options = pipe.recv()
            tables = _received(pipe, n_bytes, memory)
            if step == "feed":
                options["tables"] = tables
            pipe.send(_result(getattr(streams, step), arguments, options))
    except (EOFError, OSError):
        return


def _result(
    step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[bool, Any]:
    try:
        return True, step(*arguments, **options)
    except Exception as error:
        logging.getLogger(__name__).exception("a step failed")
        return False, type(error).__name__
