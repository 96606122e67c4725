"""setup/need.sh on machines that lack something: what it installs, and what it says when it may not."""

import os
import subprocess
from pathlib import Path

import pytest

BASIC = ("sh", "id", "paste", "grep", "mktemp", "cat", "rm", "touch", "ln")


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of commands for a machine without Python, compilers, package manager and sudo."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASIC:
        found = next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists())
        (folder / name).symlink_to(found)
    return folder


def need(repository: Path, bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": str(bare), "TMPDIR": str(bare.parent)}
    command = [str(bare / "sh"), str(repository / "setup" / "need.sh"), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_one_line_says_what_to_install_where_that_is_not_allowed(repository: Path, bare: Path):
    done = need(repository, bare, "venv")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "setup: Python cannot make a virtual environment; install it as root: "
        "apt-get install python3 python3-venv"
    ]


def test_tracing_is_left_out_with_one_line_when_the_tools_are_missing(repository: Path, bare: Path):
    done = need(repository, bare, "bpf")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "clang" in done.stderr
    assert "gcc" in done.stderr


def test_a_python_without_venv_is_told_from_no_python(repository: Path, bare: Path):
    executable(bare / "python3", "exit 1")
    assert need(repository, bare, "venv").stderr.endswith("apt-get install python3-venv\n")


def test_nothing_is_said_or_done_when_nothing_is_missing(repository: Path, bare: Path):
    executable(bare / "python3", "exit 0")
    executable(bare / "apt-get", "echo called >&2")
    done = need(repository, bare, "venv")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="other: as root only, installing is allowed without sudo")
def test_old_package_lists_are_fetched_anew_before_giving_up(repository: Path, bare: Path, tmp_path: Path):
    executable(bare / "python3", f"test -e {tmp_path}/installed")
    executable(
        bare / "apt-get",
        f"""case "$*" in
*update*) touch {tmp_path}/lists ;;
*install*python3-venv*) test -e {tmp_path}/lists || exit 100; touch {tmp_path}/installed ;;
esac""",
    )
    done = need(repository, bare, "venv")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["setup: installing Debian packages: python3-venv"]


@pytest.mark.skipif(os.geteuid() != 0, reason="other: as root only, installing is allowed without sudo")
def test_what_the_package_manager_says_is_shown_when_it_fails(repository: Path, bare: Path):
    executable(bare / "apt-get", 'echo "E: no network"; exit 100')
    done = need(repository, bare, "venv")
    assert done.returncode == 1
    assert "E: no network" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("setup: Python cannot make a virtual environment")


def test_sudo_that_asks_for_a_password_is_not_used(repository: Path, bare: Path):
    (bare / "id").unlink()
    executable(bare / "id", "echo 1000")
    executable(bare / "sudo", "exit 1")
    executable(bare / "apt-get", "echo called >&2")
    done = need(repository, bare, "venv")
    assert done.returncode == 1
    assert "called" not in done.stderr


def test_a_wrong_word_is_refused(repository: Path, bare: Path):
    assert need(repository, bare, "everything").returncode == 2
