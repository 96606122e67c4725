"""The socket for labels: permitted senders, and malformed input."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stallscope.annotate import send_labels
from stallscope.capture.process.annotation_socket import Label, Labels
from stallscope.capture.process.workload import workload
from stallscope.errors import CannotTrace

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
NOBODY, GROUP = 65534, 54321


@pytest.fixture
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("l")
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.geteuid() and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o055)
    return folder / "a.sock"


@pytest.fixture
def labels(path):
    listening = Labels(path)
    yield listening
    listening.close()


def test_a_label_is_taken_with_the_teller_that_the_kernel_names(path, labels):
    before = time.monotonic_ns()
    assert send_labels([{"label": "step", "value": "7"}, {"label": "epoch", "value": 3}], str(path)) == [
        "ok",
        "ok",
    ]
    first, second = labels.take_labels()
    assert first[1:] == (os.getpid(), "step", "7")
    assert second[1:] == (os.getpid(), "epoch", "3")
    assert before <= first.ts_ns <= time.monotonic_ns()
    assert labels.take_labels() == []


def test_a_plausible_sender_timestamp_is_used(path, labels):
    now = time.monotonic_ns()
    times = [now - 10**9, now + 10**9, now - 10**12, "soon", -1]
    assert send_labels([{"label": "step", "ts_ns": at} for at in times], str(path)) == ["ok"] * 5
    taken = [label.ts_ns for label in labels.take_labels()]
    assert taken[0] == times[0]
    assert all(now <= at <= time.monotonic_ns() for at in taken[1:])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b"7",
        b"null",
        b'{"value": 1}',
        b'{"label": "UPPER"}',
        b'{"label": "a b"}',
        b'{"label": 5}',
        b'{"label": "' + b"a" * 33 + b'"}',
        b'{"label": "step", "value": [1]}',
        b'{"label": "step", "value": true}',
        b'{"label": "step", "pid": "x"}',
        b'{"label": "step", "pid": -5}',
        b"\xff\xfe",
        b'{"label": "step", "value": "' + b"x" * 5000 + b'"}',
    ],
)
def test_nonsense_is_answered_and_the_next_label_taken(path, labels, line):
    with socket.socket(socket.AF_UNIX) as teller:
        teller.connect(str(path))
        teller.sendall(line + b"\n" + b'{"label": "step", "value": "1"}\n')
        answer = b""
        while answer.count(b"\n") < 2:
            answer += teller.recv(4096)
    assert answer.splitlines()[0] != b"ok"
    assert answer.splitlines()[1] == b"ok"
    assert [label.value for label in labels.take_labels()] == ["1"]


def test_long_values_are_cut(path, labels):
    assert send_labels([{"label": "note", "value": "x" * 500}], str(path)) == ["ok"]
    assert labels.take_labels()[0].value == "x" * 128


def test_a_line_without_end_closes_the_connection(path, labels):
    with socket.socket(socket.AF_UNIX) as teller:
        teller.settimeout(10)
        teller.connect(str(path))
        teller.sendall(b"x" * 10_000)
        assert teller.recv(10) == b""
    assert send_labels([{"label": "step"}], str(path)) == ["ok"]


def test_a_teller_that_does_not_read_is_dropped(path, labels):
    with socket.socket(socket.AF_UNIX) as teller:
        teller.settimeout(10)
        teller.connect(str(path))
        line = b'{"label": "x"}\n' * 1000
        with pytest.raises(OSError):
            while True:
                teller.sendall(line)
    assert send_labels([{"label": "step"}], str(path)) == ["ok"]


def test_many_tellers_at_once(path, labels):
    tellers = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for teller in tellers:
        teller.connect(str(path))
    for number, teller in enumerate(tellers):
        teller.sendall(json.dumps({"label": "step", "value": number}).encode() + b"\n")
    assert [teller.recv(10) for teller in tellers] == [b"ok\n"] * 50
    assert sorted(int(label.value) for label in labels.take_labels()) == list(range(50))
    for teller in tellers:
        teller.close()


def test_only_its_owner_may_use_it(path, labels):
    assert path.stat().st_mode & 0o777 == 0o600


def answer_as(path: Path, *, uid: int, gid: int, told: dict[str, object]) -> str:
    """The answer that another user gets."""
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))\n"
        "line = socket.socket(socket.AF_UNIX); line.connect(sys.argv[3])\n"
        "line.sendall(sys.argv[4].encode() + b'\\n'); print(line.recv(100).decode())"
    )
    words = [sys.executable, "-c", code, str(uid), str(gid), str(path), json.dumps(told)]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@ROOT_ONLY
def test_other_users_are_kept_out(path, labels):
    assert "PermissionError" in answer_as(path, uid=NOBODY, gid=NOBODY, told={"label": "step"})


@ROOT_ONLY
def test_peer_credentials_are_checked_even_if_the_socket_is_world_writable(path, labels):
    path.chmod(0o666)
    answer = answer_as(path, uid=NOBODY, gid=NOBODY, told={"label": "step"})
    assert "not allowed" in answer or "BrokenPipeError" in answer or "ConnectionResetError" in answer
    assert labels.n_refused == 1
    assert labels.take_labels() == []


@ROOT_ONLY
def test_group_members_may_annotate_only_their_own_processes(path):
    labels = Labels(path, GROUP)
    try:
        assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o660, GROUP)
        assert answer_as(path, uid=NOBODY, gid=GROUP, told={"label": "step"}) == "ok"
        output = answer_as(path, uid=NOBODY, gid=GROUP, told={"label": "step", "pid": os.getpid()})
        assert "not allowed" in output
        assert "PermissionError" in answer_as(path, uid=NOBODY, gid=NOBODY, told={"label": "step"})
        assert len(labels.take_labels()) == 1
    finally:
        labels.close()


def test_a_socket_that_an_agent_left_behind_is_replaced(path):
    first = Labels(path)
    first._listening.close()  # as a kill does: the file stays
    second = Labels(path)
    assert send_labels([{"label": "step"}], str(path)) == ["ok"]
    second.close()
    assert not path.exists()


def test_a_second_agent_is_refused_and_the_first_goes_on(path, labels):
    with pytest.raises(CannotTrace, match="another agent"):
        Labels(path)
    assert send_labels([{"label": "step"}], str(path)) == ["ok"]


def test_other_files_are_never_replaced(path, tmp_path):
    path.write_text("mine")
    with pytest.raises(CannotTrace, match="--annotate-socket"):
        Labels(path)
    assert path.read_text() == "mine"
    link = path.with_name("link.sock")
    link.symlink_to(path)
    with pytest.raises(CannotTrace):
        Labels(link)
    assert path.read_text() == "mine"


def test_a_folder_that_everybody_may_write_is_refused(path):
    path.parent.chmod(0o777)
    with pytest.raises(CannotTrace, match="writable for all users"):
        Labels(path)


def test_a_place_that_cannot_be_made_is_named():
    with pytest.raises(CannotTrace, match="/proc/none"):
        Labels(Path("/proc/none/a.sock"))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("0::/system.slice/docker-" + "ab" * 32 + ".scope", "ab" * 6),
        ("12:cpu:/docker/" + "0123456789ab" + "c" * 52, "0123456789ab"),
        ("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "9f" * 32 + ".scope", "9f" * 6),
        ("0::/user.slice/user-1000.slice/session-3.scope", ""),
        ("0::/", ""),
    ],
)
def test_the_container_of_a_process_is_derived_from_its_control_group(tmp_path, line, wanted):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(line + "\n")
    assert workload(7, {}, tmp_path).get("container", "") == wanted
    assert workload(8, {}, tmp_path) == {}


def test_labels_are_plain_tuples():
    assert Label(1, 2, "step", "3") == (1, 2, "step", "3")
