"""Labels from inside a job: they arrive in order, and nothing that goes wrong disturbs the job."""

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from stallscope.annotate import Annotator, lightning_callback, ray_report
from stallscope.capture.process.annotation_socket import Labels


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.sock"


@pytest.fixture
def labels(path: Path):
    listening = Labels(path)
    yield listening
    listening.close()


def told(labels: Labels, note: Annotator) -> list[tuple[str, str]]:
    assert note.flush(20)
    return [(label.label, label.value) for label in labels.take_labels()]


def test_steps_epochs_and_phases_arrive_in_order(path, labels):
    note = Annotator(str(path))
    note.epoch(2)
    assert list(note.steps(["a", "b"], first=10)) == ["a", "b"]
    with note.phase("train"), note.phase("evaluation"):
        note("lr", "0.1")
    assert told(labels, note) == [
        ("epoch", "2"),
        ("step", "10"),
        ("step", "11"),
        ("phase", "train"),
        ("phase", "evaluation"),
        ("lr", "0.1"),
        ("phase", "train"),
        ("phase", ""),
    ]
    assert (note.n_sent, note.n_dropped) == (8, 0)


def test_the_time_is_that_of_the_call(path, labels):
    note = Annotator(str(path))
    before = time.monotonic_ns()
    note.step(1)
    after = time.monotonic_ns()
    assert note.flush(20)
    assert before <= labels.take_labels()[0].ts_ns <= after


def test_without_an_agent_labels_are_dropped_and_counted(path):
    note = Annotator(str(path))
    for number in range(100):
        note.step(number)
    assert note.flush(20)
    assert (note.n_sent, note.n_dropped) == (0, 100)


def test_labels_are_dropped_after_the_agent_has_ended(path):
    labels = Labels(path)
    note = Annotator(str(path))
    note.step(1)
    assert note.flush(20)
    labels.close()
    note.step(2)
    note.step(3)
    assert note.flush(20)
    assert (note.n_sent, note.n_dropped) == (1, 2)


def test_more_than_fits_is_dropped_not_waited_for(path, monkeypatch):
    monkeypatch.setattr("stallscope.annotate._MAX_WAITING", 10)
    monkeypatch.setattr("stallscope.annotate.threading.Thread.start", lambda self: None)
    note = Annotator(str(path))
    for number in range(25):
        note.step(number)
    assert note.n_dropped == 15


def test_a_forked_process_sends_labels_with_its_own_pid(path, labels):
    note = Annotator(str(path))
    note.step(1)
    assert note.flush(20)
    code = (
        "import os, sys\nfrom stallscope.annotate import Annotator\n"
        "note = Annotator(sys.argv[1]); note.step(1); assert note.flush()\n"
        "pid = os.fork()\n"
        "if not pid:\n    note.step(2); os._exit(0 if note.flush() else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0; print(pid)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    by_value = {label.value: label.pid for label in labels.take_labels()[1:]}
    assert by_value["2"] == int(done.stdout) != by_value["1"]


def test_the_place_comes_from_the_environment(path, labels, monkeypatch):
    monkeypatch.setenv("STALLSCOPE_ANNOTATE_SOCKET", str(path))
    note = Annotator()
    note.step(5)
    assert told(labels, note) == [("step", "5")]


def test_only_the_standard_library_is_loaded():
    code = "import sys, stallscope.annotate; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(done.stdout.split()) - {"stallscope", "__main__"}
    assert {name for name in names if name not in sys.stdlib_module_names and not name.startswith("_")} <= {
        "sitecustomize",
        "usercustomize",
        "distutils-precedence",
    }


def test_lightning_callbacks_send_labels(path, labels, monkeypatch):
    """The module is a stand-in with the name and the base class that Lightning has."""
    module = types.ModuleType("lightning.pytorch.callbacks")
    module.Callback = type("Callback", (), {})
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", module)
    note = Annotator(str(path))
    callback = lightning_callback(note)
    assert isinstance(callback, module.Callback)
    trainer = types.SimpleNamespace(current_epoch=1, global_step=40)
    callback.on_train_epoch_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    callback.on_validation_start(trainer, None)
    callback.on_validation_end(trainer, None)
    assert told(labels, note) == [
        ("epoch", "1"),
        ("phase", "train"),
        ("step", "40"),
        ("phase", "validation"),
        ("phase", "train"),
    ]


def test_a_ray_report_sends_labels_and_forwards_the_metrics(path, labels):
    note, reported = Annotator(str(path)), []
    report = ray_report(note, lambda metrics, **named: reported.append((metrics, named)))
    report({"loss": 1.0})
    report({"loss": 0.5, "step": 20, "epoch": 3}, checkpoint=None)
    assert reported == [({"loss": 1.0}, {}), ({"loss": 0.5, "step": 20, "epoch": 3}, {"checkpoint": None})]
    assert told(labels, note) == [("step", "1"), ("epoch", "3"), ("step", "21")]


def test_the_pid_of_the_sender_comes_from_the_kernel(path, labels):
    note = Annotator(str(path))
    note.step(1)
    assert note.flush(20)
    assert labels.take_labels()[0].pid == os.getpid()
