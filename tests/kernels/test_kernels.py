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
    """The attach method that a Linux version supports."""
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    return "session" if version >= (6, 13) else "multi" if version >= (6, 6) else "perf"


@pytest.fixture(scope="session")
def initramfs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The initial file system of the virtual machines."""
    if not OBJECT.exists():
        pytest.skip("bpf: the BPF programs are not built (make bpf)")
    built = machine.initramfs(tmp_path_factory.mktemp("initramfs"), repository / "src", build.build())
    yield built
    built.unlink()


def result(output: str) -> Mapping[str, Any]:
    """The measurements that the script inside printed."""
    line = re.search(r"^RESULT (\{.*\})\s*$", output, re.MULTILINE)
    assert line, output[-3000:]
    measured: Mapping[str, Any] = json.loads(line[1])
    print(measured)
    return measured


@pytest.fixture
def image(name: str) -> Path:
    """The kernel of a folder."""
    for kernel in FOLDER.glob(f"{name}/boot/vmlinuz-*"):
        return kernel
    reason = FOLDER / name / "missing"
    pytest.skip(
        f"kernels: {name}: {reason.read_text().strip() if reason.exists() else 'not downloaded (make prove-kernels)'}"
    )


@pytest.mark.timeout(machine.BOOT_S + 60)
@pytest.mark.parametrize("name", NAMES)
def test_every_round_is_traced_on_this_kernel(image: Path, initramfs: Path):
    measured = result(machine.output(image, initramfs))
    assert measured["kernel"] in image.name
    assert measured["mode"] == best_mode(measured["kernel"])
    assert measured["exit_code"] == 0
    assert measured["rounds"] == measured["expected"]
    assert min(measured["rounds"]) > 0
    assert measured["in_order"]
    assert measured["n_snapshots"] > 0
    assert measured["lost"] == {}
    assert set(measured["driver_calls"].values()) == {N_IOCTLS}
    assert_quota_is_recorded(measured)
    assert_victim_is_recorded(measured["memory"])
    yama = measured["under_yama"]
    assert yama["is_forbidden"]
    assert [frame for frame in yama["frames"][0] if "<string>" in frame] == [
        "<string>:2 hangs",
        "<string>:4 <module>",
    ]
    assert yama["messages"] == []


def assert_quota_is_recorded(measured: Mapping[str, Any]) -> None:
    """The rows of the group, the rank's threads and the verdict all state that only this rank was throttled."""
    counted, recorded = measured["throttled"], measured["recorded_throttling"]
    assert counted["nr_throttled"] >= N_STAYS * N_PAUSES
    limited, free = recorded[str(LIMITED_RANK)], recorded[str(1 - LIMITED_RANK)]
    assert (limited["quotas"], limited["groups"]) == ([f"cpu.max {QUOTA_US}/{PERIOD_US}"], ["/limited"])
    # Periods before the agent first saw the rank in the group, and after it last saw it there, are not in the trace.
    assert 0 < limited["n"] <= counted["nr_throttled"]
    assert 0 < limited["ns"] / 1000 <= counted["throttled_usec"]
    # The last pause of a stay ends with it.
    assert limited["off_cpu_ns"] / 1000 > N_STAYS * (N_PAUSES - 1) * PERIOD_US / 3
    assert free == {"n": 0, "ns": 0, "quotas": [], "groups": [], "off_cpu_ns": 0}
    (verdict,) = [verdict for verdict in measured["verdicts"] if verdict["kind"] == "straggler"]
    assert verdict["ranks"] == [LIMITED_RANK]
    assert verdict["causes"][0]["cause"] == "cpu_preemption"
    evidence = verdict["causes"][0]["evidence"]
    assert (evidence["quota"], evidence["control_group"]) == (limited["quotas"][0], "/limited")


def assert_victim_is_recorded(memory: Mapping[str, Any]) -> None:
    """The killed process, the process that requested the memory, and the reclaim before. The other process is not
    traced; some kernels also kill it before the memory of the first is free.
    """
    assert memory["ends"][0] == -signal.SIGKILL
    assert memory["kills"] == [["victim", "other"]]
    assert memory["statuses"] == [128 + signal.SIGKILL]
    assert memory["reclaim_ns"] > 0
    assert memory["traced"] == ["victim"]
