"""Files that are replaced atomically."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from stallscope.store import file_modes


def test_a_pipe_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file_modes.replace(pipe, b"report")
        assert os.read(reader, 100) == b"report"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_of_another_user_is_no_stream(tmp_path, monkeypatch):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    assert file_modes.is_stream(link)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert file_modes.is_stream(pipe) and not file_modes.is_stream(link)


def test_a_link_of_the_system_is_a_stream_even_if_it_leads_to_a_file():
    assert file_modes.is_stream(Path("/proc/self/exe"))


def test_a_link_of_another_user_in_shared_memory_is_replaced_and_not_its_target(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: a link of another user")
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        link = Path(folder) / "report.html"
        link.symlink_to(target)
        os.lchown(link, 12345, 12345)
        file_modes.replace(link, b"new")
        assert (link.is_symlink(), link.read_bytes(), target.read_bytes()) == (False, b"new", b"old")


def test_a_replaced_file_has_the_given_mode(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"old")
    file.chmod(0o644)
    file_modes.replace(file, b"new")
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"new", 0o600)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path):
    file = tmp_path / "report.html"
    file.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), file_modes.replacing(file) as new:
        new.write_bytes(b"half")
        raise OSError("the disk is full")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
