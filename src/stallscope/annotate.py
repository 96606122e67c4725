"""Labels from inside a job: its current step, epoch or phase. Needs the standard library only.

    from stallscope.annotate import Annotator

    annotator = Annotator()
    for batch in annotator.steps(loader):
        with annotator.phase("forward"):
            ...

A call takes some microseconds and never waits, raises or disturbs the job: a thread sends the labels to the agent
of this machine. Without an agent, or if it is too slow, labels are dropped and counted in `n_dropped`.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

DEFAULT_SOCKET = "/run/stallscope/annotate.sock"
VARIABLE = "STALLSCOPE_ANNOTATE_SOCKET"
_MAX_WAITING = 10_000
_AGAIN_S = 5.0
_TIMEOUT_S = 5.0

T = TypeVar("T")


class Annotator:
    """Sends labels to the agent. One object per process is enough; any thread may use it.

    path: the agent's socket; by default the path in STALLSCOPE_ANNOTATE_SOCKET, or the agent's default.
    """

    def __init__(self, path: str | None = None):
        self.n_sent = 0
        self.n_dropped = 0
        self._path = path or os.environ.get(VARIABLE) or DEFAULT_SOCKET
        self._phases: list[str] = []
        self._begin()

    def __call__(self, label: str, value: object) -> None:
        """Send a label of any kind: it is valid until the next of its kind from this process."""
        if self._pid != os.getpid():  # a fork has no threads
            self._begin()
        try:
            self._waiting.put_nowait((time.monotonic_ns(), label, str(value)))
        except queue.Full:
            self.n_dropped += 1

    def step(self, number: int) -> None:
        """Mark the start of a training step."""
        self("step", number)

    def epoch(self, number: int) -> None:
        """Mark the start of an epoch."""
        self("epoch", number)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside the with block the job is in this phase; afterwards in the previous phase again."""
        self._phases.append(name)
        self("phase", name)
        try:
            yield
        finally:
            self._phases.pop()
            self("phase", self._phases[-1] if self._phases else "")

    def steps(self, batches: Iterable[T], *, first: int = 0) -> Iterator[T]:
        """The batches; marks a step for each."""
        for number, batch in enumerate(batches, first):
            self.step(number)
            yield batch

    def flush(self, timeout_s: float = _TIMEOUT_S) -> bool:
        """Wait until all labels are sent or dropped; False after the timeout."""
        end_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)
        return not self._waiting.unfinished_tasks

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: queue.Queue[tuple[int, str, str]] = queue.Queue(_MAX_WAITING)
        threading.Thread(target=self._send_all, daemon=True, name="stallscope-annotate").start()

    def _send_all(self) -> None:
        waiting, again_s, line = self._waiting, 0.0, None
        while True:
            ts_ns, label, value = waiting.get()
            if line is None and time.monotonic() >= again_s:
                line = _connected(self._path)
                again_s = time.monotonic() + _AGAIN_S
            if line is not None:
                label_fields = {"ts_ns": ts_ns, "label": label, "value": value}
                try:
                    is_taken = _exchanged(line, label_fields) == "ok"
                except OSError:
                    line, is_taken = None, False
                self.n_sent += is_taken
                self.n_dropped += not is_taken
            else:
                self.n_dropped += 1
            waiting.task_done()


def send_labels(label_fields: Iterable[dict[str, Any]], path: str) -> list[str]:
    """Send labels and wait: the agent's answer to each, "ok" or an error. Raises OSError without an agent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_TIMEOUT_S)
        line.connect(path)
        return [_exchanged(line, label_field) for label_field in label_fields]


def lightning_callback(annotator: Annotator | None = None) -> Any:
    """A callback for `Trainer(callbacks=[...])` of Lightning: marks steps, epochs, and train or validation."""
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback
    note = annotator or Annotator()

    class StepLabels(Callback):  # type: ignore[misc]
        """Lightning requires a class."""

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            note.epoch(trainer.current_epoch)
            note("phase", "train")

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            note.step(trainer.global_step)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            note("phase", "validation")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            note("phase", "train")

    return StepLabels()


def ray_report(
    annotator: Annotator | None = None, report: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`ray.train.report` that also sends labels: a report ends a step, and its metrics may name it ("step", "epoch").

    report: the function to call; by default Ray's own.
    """
    if report is None:
        from ray import train

        report = train.report
    note, real = annotator or Annotator(), report
    count = iter(range(1 << 62))

    def callback(metrics: dict[str, Any], *rest: Any, **named: Any) -> Any:
        result = real(metrics, *rest, **named)
        number = next(count)
        if "epoch" in metrics:
            note.epoch(metrics["epoch"])
        note.step(int(metrics.get("step", number)) + 1)
        return result

    return callback


def _connected(path: str) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(_TIMEOUT_S)
    try:
        line.connect(path)
    except OSError:
        line.close()
        return None
    return line


def _exchanged(line: socket.socket, label_fields: dict[str, Any]) -> str:
    """One label and the answer to it. Raises OSError when the agent has gone; the connection is closed then."""
    try:
        line.sendall(json.dumps(label_fields).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            new = line.recv(4096)
            if not new:
                raise ConnectionResetError("the agent has closed the connection")
            answer += new
    except OSError:
        with suppress(OSError):
            line.close()
        raise
    return answer.decode().strip()
