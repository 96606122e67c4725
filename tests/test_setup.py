"""setup/*.sh on machines with missing tools: installed packages, downloads, and messages on failure."""

import importlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stallscope import __version__

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
        result = next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists())
        (folder / name).symlink_to(result)
    return folder


def need(repository: Path, bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": str(bare), "TMPDIR": str(bare.parent)}
    command = [str(bare / "sh"), str(repository / "setup" / "need.sh"), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_one_line_names_the_packages_when_installing_is_not_allowed(repository: Path, bare: Path):
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


def test_python_without_venv_is_distinguished_from_missing_python(repository: Path, bare: Path):
    executable(bare / "python3", "exit 1")
    assert need(repository, bare, "venv").stderr.endswith("apt-get install python3-venv\n")


def test_no_action_is_taken_when_all_tools_are_present(repository: Path, bare: Path):
    executable(bare / "python3", "exit 0")
    executable(bare / "apt-get", "echo called >&2")
    done = need(repository, bare, "venv")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="other: as root only, installing is allowed without sudo")
def test_outdated_package_lists_are_updated_before_the_setup_fails(
    repository: Path, bare: Path, tmp_path: Path
):
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
def test_the_output_of_a_failing_package_manager_is_shown(repository: Path, bare: Path):
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


def test_virtual_machines_are_left_out_with_one_line_when_their_tools_are_missing(
    repository: Path, bare: Path
):
    executable(bare / "uname", "echo x86_64")
    executable(bare / "cpio", "")
    done = need(repository, bare, "kernels")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "setup: without other kernels: virtual machines cannot be started; "
        "install as root: apt-get install qemu-system-x86 busybox-static"
    ]


def test_virtual_machines_are_not_set_up_on_other_architectures(repository: Path, bare: Path):
    executable(bare / "uname", "echo aarch64")
    executable(bare / "apt-get", "echo called >&2")
    done = need(repository, bare, "kernels")
    assert (done.returncode, "called" in done.stderr) == (3, False)


RELEASE = """case "$*" in
*--print-uris*) echo "'http://mirror/debian/dists/old/InRelease' mirror_InRelease 0" ;;
*update) grep -q "mirror/debian/ new main" sources.list || { echo "E: no network"; exit 100; } ;;
*download*) echo fetched >>../fetched; touch "${*##* }_1_amd64.deb" ;;
esac"""
"""apt-get, where the machine is of the release `old` and the archive has `new` too."""


@pytest.fixture
def archive(bare: Path) -> Path:
    """The folder of commands, with those that fetch: of the release `new`, the kernels 6.9 and 6.10."""
    for name in ("dirname", "mkdir", "chmod", "find", "sed", "head", "tail", "sort", "tar", "mv"):
        (bare / name).symlink_to(next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists()))
    executable(bare / "apt-get", RELEASE)
    kernels = [f"linux-image-6.{n}-cloud-amd64{end}" for n in ("9.3", "10.2") for end in ("", "-unsigned")]
    executable(bare / "apt-cache", f"printf '%s\\n' linux-image-6-cloud-amd64 {' '.join(kernels)}")
    executable(bare / "dpkg", "d=$(mktemp -d); echo ${2%%_*} >$d/vmlinuz-6; tar -C $d -c ./vmlinuz-6")
    return bare


def kernels(repository: Path, archive: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return fetched(repository, archive, "kernels", *words)


def fetched(repository: Path, archive: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The output of setup/SCRIPT.sh, which fetches into the folder SCRIPT."""
    command = [str(archive / "sh"), str(repository / "setup" / f"{script}.sh"), str(archive.parent / script)]
    environ = {"PATH": str(archive), "TMPDIR": str(archive.parent)}
    return subprocess.run([*command, *words], env=environ, capture_output=True, text=True)


def test_a_program_is_unpacked_once(repository: Path, archive: Path, tmp_path: Path):
    executable(
        archive / "dpkg",
        "d=$(mktemp -d); mkdir -p $d/usr/bin; touch $d/usr/bin/tool; chmod +x $d/usr/bin/tool; tar -C $d -c .",
    )
    for _ in range(2):
        done = fetched(repository, archive, "program", "tool/new")
        assert (done.returncode, done.stderr) == (0, "")
    assert os.access(tmp_path / "program/usr/bin/tool", os.X_OK)
    assert (tmp_path / "fetched").read_text() == "fetched\n"


@pytest.mark.parametrize(("release", "reason"), [("gone", "E: no network"), ("new", "no program in tool")])
def test_an_unavailable_program_is_reported(repository: Path, archive: Path, release: str, reason: str):
    executable(archive / "dpkg", "tar -c --files-from /dev/null")
    done = fetched(repository, archive, "program", f"tool/{release}")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == f"setup: no tool: {reason}; the tests with it will be skipped"


def test_the_newest_kernel_of_a_release_is_unpacked_once(repository: Path, archive: Path, tmp_path: Path):
    for _ in range(2):
        done = kernels(repository, archive, "6/new")
        assert (done.returncode, done.stderr) == (0, "")
    (image,) = (path for path in (tmp_path / "kernels/6").rglob("*") if path.is_file())
    assert image == tmp_path / "kernels/6/boot/vmlinuz-6.10.2-cloud-amd64"
    assert image.read_text() == "linux-image-6.10.2-cloud-amd64\n"
    assert (tmp_path / "kernels/fetched").read_text() == "fetched\n"


def test_a_kernel_in_a_package_of_its_own_is_found(repository: Path, archive: Path, tmp_path: Path):
    names = (f"linux-{kind}-7.2.1-cloud-amd64" for kind in ("image", "binary", "modules"))
    executable(archive / "apt-cache", f"printf '%s\\n' {' '.join(names)}")
    assert kernels(repository, archive, "7/new").stderr == ""
    image = tmp_path / "kernels/7/boot/vmlinuz-7.2.1-cloud-amd64"
    assert image.read_text() == "linux-binary-7.2.1-cloud-amd64\n"


def test_a_package_without_a_kernel_is_reported(repository: Path, archive: Path):
    executable(archive / "dpkg", "tar -c --files-from /dev/null")
    assert "no kernel in linux-image-6.10.2-cloud-amd64" in kernels(repository, archive, "6/new").stderr


@pytest.mark.parametrize(
    ("release", "reason"), [("gone", "E: no network"), ("new", "no cloud kernel of that name in new")]
)
def test_a_kernel_that_cannot_be_had_leaves_the_reason(
    repository: Path, archive: Path, tmp_path: Path, release: str, reason: str
):
    executable(archive / "apt-cache", "echo linux-image-6-amd64")
    done = kernels(repository, archive, f"6/{release}")
    assert done.returncode == 0
    assert done.stderr == f"setup: no kernel 6: {reason}; its test will be skipped\n"
    assert (tmp_path / "kernels/6/missing").read_text() == f"{reason}\n"


def test_a_machine_without_an_archive_of_debian_fetches_no_kernel(repository: Path, archive: Path):
    executable(archive / "apt-get", "")
    assert "apt has no Debian archive in its settings" in kernels(repository, archive, "6/new").stderr


@pytest.fixture
def set_version(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(repository / "setup"))
    return importlib.import_module("set_version")


def test_all_files_state_the_version_of_the_package(set_version):
    assert set_version.stated() == {key: {__version__} for key in set_version.STATED}


def test_a_release_sets_all_versions_and_dates_its_changes(set_version, repository: Path, tmp_path: Path):
    for name in [*set_version.STATED, "CHANGELOG.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    log = tmp_path / "CHANGELOG.md"
    before = log.read_text()
    for bad, reason in (("1.2", "MAJOR.MINOR.PATCH"), (__version__, "not newer"), ("0.0.9", "not newer")):
        with pytest.raises(ValueError, match=reason):
            set_version.set_version(bad, tmp_path)
    assert log.read_text() == before
    set_version.set_version("97.0.1", tmp_path, "2030-01-02")
    assert set_version.stated(tmp_path) == {key: {"97.0.1"} for key in set_version.STATED}
    assert log.read_text() == before.replace("## Unreleased\n", "## Unreleased\n\n## 97.0.1 (2030-01-02)\n")
    with pytest.raises(ValueError, match="no changes"):
        set_version.set_version("98.0.0", tmp_path)
