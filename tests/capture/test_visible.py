"""The machine's GPU numbers from a process's visible devices: a simulated /proc and a real /dev."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stallscope.capture.process.process_identity import identity
from stallscope.capture.process.visible_devices import GpuNumbers, visible_gpus
from stallscope.capture.rows.device_numbers import DeviceNumbers
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import MemoryKind

ALL = GpuNumbers(
    by_file={file: file for file in range(8)},
    by_uuid={"GPU-00aa": 0, "GPU-11bb": 1, "GPU-11cc": 5, "MIG-77": 5},
)


def process(
    proc: Path, pid: int, files: tuple[int, ...] = (), visible_gpus: str = "", kind: str = "tmpfs"
) -> Path:
    home = proc / str(pid)
    (home / "root/dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{number}" for number in files)):
        (home / "root/dev" / name).touch()
    (home / "mountinfo").write_text(
        f"1 0 0:2 / / rw - overlay overlay rw\n2 1 0:3 / /dev rw,nosuid shared:1 - {kind} none rw\n"
    )
    (home / "environ").write_text(f"CUDA_VISIBLE_DEVICES={visible_gpus}\0" if visible_gpus else "")
    (home / "stat").write_text(f"{pid} (job) S 1 " + " ".join(["0"] * 17) + " 4711 0 0\n")
    return home


@pytest.mark.parametrize(
    ("files", "expected", "observed"),
    [
        ((0, 1, 2, 3), None, (0, 1, 2, 3)),
        ((0, 1, 2, 3), "3,1", (3, 1)),
        ((2, 5), None, (2, 5)),
        ((2, 5), "1", (5,)),  # a container that was given two of eight
        ((2, 5), "1,2,0", (5,)),  # the third GPU does not exist: CUDA hides all entries after it
        ((0, 1, 5), "GPU-11c, GPU-00aa", (5, 0)),
        ((0, 1, 5), "MIG-77", (5,)),
        ((0, 1, 5), "GPU-11", ()),  # two begin so
        ((0, 1, 5), "GPU-99", ()),
        ((0, 1), "", ()),
        ((0, 1), "-1", ()),
        ((), "3", (3,)),
    ],
)
def test_visible_gpus_are_listed_in_the_order_of_the_process(tmp_path: Path, files, expected, observed):
    variables = {} if expected is None else {"CUDA_VISIBLE_DEVICES": expected}
    assert visible_gpus(process(tmp_path, 7, files), variables, ALL) == observed


def test_the_driver_may_count_otherwise_than_files(tmp_path: Path):
    numbers = GpuNumbers(by_file={0: 1, 1: 0, 2: 3, 3: 2})
    assert visible_gpus(process(tmp_path, 7, (2, 3)), {}, numbers) == (3, 2)


def test_a_dev_that_is_a_tenants_is_not_looked_at(tmp_path: Path):
    assert visible_gpus(process(tmp_path, 7, (2, 5), kind="fuse.mine"), {}, ALL) == ()
    elsewhere = process(tmp_path, 8)
    shutil.rmtree(elsewhere / "root/dev")
    (elsewhere / "root/dev").symlink_to(tmp_path / "7/root/dev")
    assert visible_gpus(elsewhere, {}, ALL) == ()


def test_the_only_visible_gpu_is_the_device(tmp_path: Path):
    process(tmp_path, 7, (2, 5), "GPU-11cc")
    assert identity(7, tmp_path, gpus=ALL).device == 5


def test_rows_have_the_machines_numbers(tmp_path: Path):
    process(tmp_path, 7, (0, 1, 2, 3), "3,1")
    process(tmp_path, 8, (6,))
    process(tmp_path, 9, (0, 1, 2, 3))
    rows = layout.empty(layout.CALLS, 8)
    rows["pid"] = [7, 7, 7, 7, 8, 8, 9, 10]
    rows["device"] = [0, 1, 2, UNKNOWN, 0, UNKNOWN, 2, 4]
    DeviceNumbers(ALL, tmp_path).renumber(rows)
    assert rows["device"].tolist() == [3, 1, 2, UNKNOWN, 6, 6, 2, 4]


def test_memory_of_the_host_stays_on_no_device(tmp_path: Path):
    process(tmp_path, 8, (6,))
    rows = layout.empty(layout.MEMORY, 3)
    rows["pid"], rows["device"] = 8, UNKNOWN
    rows["kind"] = [MemoryKind.DEVICE, MemoryKind.HOST, MemoryKind.MANAGED]
    DeviceNumbers(ALL, tmp_path).renumber(rows)
    assert rows["device"].tolist() == [6, UNKNOWN, UNKNOWN]


def test_a_number_given_again_is_looked_at_again(tmp_path: Path):
    process(tmp_path, 8, (6,))
    renumbering, rows = DeviceNumbers(ALL, tmp_path), layout.empty(layout.CALLS, 1)
    rows["pid"] = 8
    renumbering.renumber(rows)
    shutil.rmtree(tmp_path / "8")
    process(tmp_path, 8, (4,))
    renumbering.forget(8)
    rows["device"] = 0
    renumbering.renumber(rows)
    assert rows["device"].tolist() == [4]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="root: mounts a /dev of its own")
def test_a_real_container_is_looked_into():
    script = 'mount -t tmpfs none /dev && touch /dev/nvidia2 /dev/nvidia5 && exec "$@"'
    child = [sys.executable, "-c", "print(flush=True); input()"]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *child]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        home = Path(f"/proc/{process.pid}")
        assert visible_gpus(home, {}, GpuNumbers()) == (2, 5)
        assert visible_gpus(home, {"CUDA_VISIBLE_DEVICES": "1"}, GpuNumbers()) == (5,)
        process.kill()
