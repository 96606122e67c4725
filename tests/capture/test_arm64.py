"""The programs for arm64: built here, and of the same layouts as those that this machine runs."""

import subprocess
from pathlib import Path

import pytest

from stallscope.capture.probes.btf import Btf
from stallscope.capture.probes.program import OBJECT
from stallscope.events import kernel

from .conftest import ARM_HEADERS

pytestmark = pytest.mark.bpf


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object for arm64."""
    folder = tmp_path_factory.mktemp("arm64")
    words = ["make", "-s", "-C", str(repository / "bpf"), "arm64", f"OUT={folder}", f"BUILD={folder}/parts"]
    subprocess.run([*words, f"ARM_HEADERS={ARM_HEADERS}"], check=True)
    return folder / "stallscope.aarch64.bpf.o"


def functions(path: Path) -> set[str]:
    """Its programs, and the functions that they share."""
    lines = subprocess.check_output(["readelf", "--wide", "--symbols", path], text=True).splitlines()
    return {words[-1] for line in lines if "FUNC" in (words := line.split())}


def test_it_has_the_programs_and_layouts_that_this_version_expects(built: Path, bpf_object: Path):
    types = Btf(built.read_bytes())
    for name, dtype in kernel.STRUCTS.items():
        assert types.dtype(name) == dtype, name
    assert functions(built) == functions(OBJECT) != set()
