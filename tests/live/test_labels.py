"""Labels sent while a job runs are in its trace and select parts of it."""

import signal
import time

import pytest

from stallscope.annotate import send_labels
from stallscope.store import node
from stallscope.store.time_range import Part

from ..patience import until

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]


def test_annotated_phases_select_their_part_of_the_trace(agent, job, only, tmp_path):
    path = tmp_path / "annotate.sock"
    job = job(seconds=600)  # the fixture ends it
    tracer = agent("--annotate-socket", path, *only(job))
    tracer.says("attached", "libnccl")
    job.go()
    tracer.says("1 communicator")
    output, n_before = [], 0
    for name in ("warm", "train"):
        n_before = tracer.stores(more_than=n_before)
        output.append(time.monotonic_ns())
        assert send_labels([{"label": "phase", "value": name, "pid": job.pids[0]}], str(path)) == ["ok"]
        until(lambda name=name: name.encode() in node.read(tracer.db).annotations["value"])
        until(lambda name=name: len(node.read(tracer.db, part=Part(phase=name)).collectives))
    assert tracer.ended(signal.SIGINT) == 0
    assert not path.exists()
    labels = node.read(tracer.db).annotations
    assert [(label["value"], label["pid"]) for label in labels] == [
        (b"warm", job.pids[0]),
        (b"train", job.pids[0]),
    ]
    warm = node.read(tracer.db, part=Part(phase="warm")).collectives["ts_ns"]
    train = node.read(tracer.db, part=Part(phase="train")).collectives["ts_ns"]
    assert output[0] <= warm.min() < warm.max() < train.min()
    assert output[1] <= train.min()


def test_an_occupied_annotate_socket_does_not_prevent_tracing(agent, tmp_path):
    path = tmp_path / "annotate.sock"
    first = agent("--annotate-socket", path)
    first.says("process")
    second = agent("--annotate-socket", path, "--db", str(tmp_path / "other.db"))
    second.says("labels are not accepted", "another agent")
    second.says("process")
    assert second.ended(signal.SIGINT) == 0
    assert path.exists()
    assert first.ended(signal.SIGINT) == 0


def test_a_group_that_does_not_exist_is_named(agent, tmp_path):
    tracer = agent("--annotate-socket", tmp_path / "a.sock", "--annotate-group", "no-such-group")
    assert tracer.ended() == 3
    assert "no-such-group" in tracer.lines()[-1]
