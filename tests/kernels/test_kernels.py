"""On other kernels, in a virtual machine: the programs load, attach by the best available method, and count right.

setup/kernels.sh downloads the kernels into folders. The folder of an unavailable kernel has the reason, and its test is
skipped.
"""

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.probes.program import OBJECT
from stallscope.demo import build

from . import machine
from .inside import LIMITED_RANK, N_IOCTLS, N_PAUSES, N_STAYS, PERIOD_US, QUOTA_US

FOLDER = Path(__file__).resolve().parents[2] / "build/kernels"
NAMES = sorted(each.name for each in FOLDER.glob("*") if each.is_dir()) or ["none"]

pytestmark = [pytest.mark.kernels, pytest.mark.compiler, pytest.mark.prove]


def best_mode(release: str) -> str:
    """How functions are hooked from which Linux on."""
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    return "session" if version >= (6, 13) else "multi" if version >= (6, 6) else "perf"


@pytest.fixture(scope="session")
def initramfs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the small machines have in memory."""
    if not OBJECT.exists():
        pytest.skip("bpf: the BPF programs are not built (make bpf)")
    built = machine.initramfs(tmp_path_factory.mktemp("initramfs"), repository / "src", build.build())
    yield built
    built.unlink()


def result(said: str) -> Mapping[str, Any]:
    """What the script inside has measured."""
    found = re.search(r"^RESULT (\{.*\})\s*$", said, re.MULTILINE)
    assert found, said[-3000:]
    measured: Mapping[str, Any] = json.loads(found[1])
    print(measured)
    return measured


@pytest.fixture
def image(name: str) -> Path:
    """The kernel of a folder."""
    for found in FOLDER.glob(f"{name}/boot/vmlinuz-*"):
        return found
    told = FOLDER / name / "missing"
    pytest.skip(
        f"kernels: {name}: {told.read_text().strip() if told.exists() else 'none was fetched (make setup)'}"
    )


@pytest.mark.timeout(machine.BOOT_S + 60)
@pytest.mark.parametrize("name", NAMES)
def test_every_round_is_traced_on_this_kernel(image: Path, initramfs: Path):
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
    assert_quota_is_told(found)
    assert_victim_is_told(found["memory"])
    yama = found["under_yama"]
    assert yama["is_forbidden"]
    assert [frame for frame in yama["frames"][0] if "<string>" in frame] == [
        "<string>:2 hangs",
        "<string>:4 <module>",
    ]
    assert yama["said"] == []


def assert_quota_is_told(found: Mapping[str, Any]) -> None:
    """The rank in the group was throttled: the group, the rank's threads and the diagnosis say so, of it alone."""
    counted, told = found["throttled"], found["told_throttled"]
    assert counted["nr_throttled"] >= N_STAYS * N_PAUSES
    limited, free = told[str(LIMITED_RANK)], told[str(1 - LIMITED_RANK)]
    assert (limited["quotas"], limited["groups"]) == ([f"cpu.max {QUOTA_US}/{PERIOD_US}"], ["/limited"])
    # What was counted before the agent first saw the rank in the group, and after it last did, is not in the trace.
    assert 0 < limited["n"] <= counted["nr_throttled"]
    assert 0 < limited["ns"] / 1000 <= counted["throttled_usec"]
    # The last pause of a stay ends with it.
    assert limited["off_cpu_ns"] / 1000 > N_STAYS * (N_PAUSES - 1) * PERIOD_US / 3
    assert free == {"n": 0, "ns": 0, "quotas": [], "groups": [], "off_cpu_ns": 0}
    (verdict,) = [one for one in found["verdicts"] if one["kind"] == "straggler"]
    assert verdict["ranks"] == [LIMITED_RANK]
    assert verdict["causes"][0]["cause"] == "cpu_preemption"
    said = verdict["causes"][0]["evidence"]
    assert (said["quota"], said["control_group"]) == (limited["quotas"][0], "/limited")


def assert_victim_is_told(memory: Mapping[str, Any]) -> None:
    """Who was ended for memory, by whose wish, and that it looked for memory before; nothing of the other one, which
    some kernels end too before they have taken back what the first one held.
    """
    assert memory["ends"][0] == -signal.SIGKILL
    assert memory["kills"] == [["victim", "other"]]
    assert memory["statuses"] == [128 + signal.SIGKILL]
    assert memory["reclaim_ns"] > 0
    assert memory["told_of"] == ["victim"]
