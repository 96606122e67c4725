"""On other kernels, in a small machine: the programs load, hook in the best way there is, and count right.

`make kernels` fetches the kernels and says where they are; without them this is skipped.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.program import OBJECT
from stallscope.demo import build

from . import machine
from .inside import N_IOCTLS

FOLDER = os.environ.get("STALLSCOPE_KERNELS", "")
IMAGES = sorted(Path(FOLDER).glob("**/boot/vmlinuz-*")) if FOLDER else []

pytestmark = pytest.mark.compiler


def best_mode(release: str) -> str:
    """How functions are hooked from which Linux on."""
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    return "session" if version >= (6, 13) else "multi" if version >= (6, 6) else "perf"


@pytest.fixture(scope="session")
def initramfs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the small machines have in memory."""
    if reason := machine.missing():
        pytest.skip(f"other: {reason}")
    if not OBJECT.exists():
        pytest.skip("bpf: the BPF programs are not built (make bpf)")
    return machine.initramfs(tmp_path_factory.mktemp("initramfs"), repository / "src", build.build())


def result(said: str) -> Mapping[str, Any]:
    """What the script inside has measured."""
    found = re.search(r"^RESULT (\{.*\})\s*$", said, re.MULTILINE)
    assert found, said[-3000:]
    measured: Mapping[str, Any] = json.loads(found[1])
    print(measured)
    return measured


@pytest.mark.timeout(machine.BOOT_S + 60)
@pytest.mark.skipif(not IMAGES, reason="other: no kernels to try (make kernels fetches some)")
@pytest.mark.parametrize("image", IMAGES or [Path("none")], ids=lambda image: image.name)
def test_every_round_is_traced_on_this_kernel(initramfs: Path, image: Path):
    found = result(machine.said(image, initramfs))
    assert found["kernel"] in image.name
    assert found["mode"] == best_mode(found["kernel"])
    assert found["exit_code"] == 0
    assert found["rounds"] == found["expected"]
    assert min(found["rounds"]) > 0
    assert found["in_order"]
    assert found["n_snapshots"] > 0
    assert found["lost"] == {}
    assert set(found["driver_calls"].values()) == {N_IOCTLS}
    yama = found["under_yama"]
    assert yama["is_forbidden"]
    assert [frame for frame in yama["frames"][0] if "<string>" in frame] == [
        "<string>:2 hangs",
        "<string>:4 <module>",
    ]
    assert yama["said"] == []
