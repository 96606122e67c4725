"""The wheel: built from the sources, it contains the BPF programs and answers without optional packages."""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network access, by the build backend of this environment."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        "import os, sys; from hatchling import build; os.chdir(sys.argv[1]); build.build_wheel(sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(repository), str(folder)], capture_output=True, text=True
    )
    if "cannot compile the BPF programs" in done.stderr:
        pytest.skip(f"compiler: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_contains_the_bpf_programs_of_both_architectures(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    for machine in ("x86_64", "aarch64"):
        assert f"stallscope/capture/stallscope.{machine}.bpf.o" in names
    assert "stallscope/capture/lib/x86_64/libbpf.so.1" in names


def test_the_wheel_contains_the_libraries_that_jobs_load(wheel: Path, tmp_path: Path):
    """Packages and images install this wheel. NCCL opens the plugin by its path, so it must load from there."""
    machine = os.uname().machine
    names = [
        f"stallscope/capture/gpu/plugin/{machine}/{name}"
        for name in ("libnccl-profiler-stallscope.so", "libstallscope-look.so")
    ]
    with zipfile.ZipFile(wheel) as archive:
        paths = [archive.extract(name, tmp_path) for name in names]
    assert hasattr(ctypes.CDLL(paths[0]), "ncclProfiler_v5")
    assert hasattr(ctypes.CDLL(paths[1]), "stallscope_look")


def test_the_demo_of_the_wheel_needs_no_optional_package(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.modules |= dict.fromkeys(('pyarrow', 'grpc', 'duckdb'));"
        "sys.argv = ['stallscope', 'demo']; from stallscope.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "Rank 2" in done.stdout, done.stderr


@pytest.mark.parametrize("source", ["nccl_plugin", "gpu_look"])
def test_the_libraries_that_jobs_load_are_equal_wherever_they_are_built(
    repository: Path, tmp_path: Path, source: str
):
    built = []
    for name in ("one", "another"):
        folder, out = tmp_path / name / source, tmp_path / name / "library.so"
        shutil.copytree(repository / source, folder)
        subprocess.run(["make", "--silent", "-C", folder, f"OUT={out}"], check=True)
        subprocess.run(["strip", "--strip-debug", out], check=True)
        built.append(out.read_bytes())
    assert built[0] == built[1]
