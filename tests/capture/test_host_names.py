"""Quotas, devices, owners of sockets and missing kernel features, from simulated files and lists."""

import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.gpu.devices import Devices
from stallscope.capture.host import exit_status
from stallscope.capture.probes.optional_programs import FEATURES, IOCTL_WAYS, OptionalPrograms, driver_calls
from stallscope.capture.process.control_groups import ControlGroups
from stallscope.capture.process.sockets import SocketOwners, peer_address
from stallscope.events import kernel

SECOND_NS = 10**9
V2_MOUNT = "30 24 0:26 / {0} rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "31 24 0:27 / {0} rw - cgroup cgroup rw,cpu,cpuacct\n"


def proc_with(folder: Path, pid: int, *, mounts: str = "", groups: str = "") -> Path:
    for name in ("self", str(pid)):
        (folder / "proc" / name).mkdir(parents=True)
    (folder / "proc/self/mountinfo").write_text(mounts)
    (folder / f"proc/{pid}/mountinfo").write_text(mounts)
    (folder / f"proc/{pid}/cgroup").write_text(groups)
    return folder / "proc"


def test_a_quota_of_a_parent_group_is_reported(tmp_path: Path):
    root = tmp_path / "cgroup"
    (root / "pod/rank").mkdir(parents=True)
    (root / "pod/rank/cpu.max").write_text("max 100000\n")
    (root / "pod/cpu.max").write_text("50000 100000\n")
    stat = "usage_usec 9\nnr_periods 10\nnr_throttled {}\nthrottled_usec {}\n"
    (root / "pod/cpu.stat").write_text(stat.format(3, 200))
    groups = ControlGroups(proc_with(tmp_path, 7, mounts=V2_MOUNT.format(root), groups="0::/pod/rank\n"))
    assert not groups.new_throttling([7], SECOND_NS)
    assert not groups.new_throttling([7], 2 * SECOND_NS)
    (root / "pod/cpu.stat").write_text(stat.format(5, 260))
    (throttled,) = groups.new_throttling([7], 3 * SECOND_NS)
    assert (throttled.group.name, throttled.quota, throttled.n, throttled.ns) == (
        "/pod",
        "cpu.max 50000/100000",
        2,
        60_000,
    )
    assert (throttled.since_ns, throttled.pids) == (2 * SECOND_NS, (7,))


def test_a_quota_of_version_1_is_in_its_own_words(tmp_path: Path):
    root = tmp_path / "cpu"
    (root / "job").mkdir(parents=True)
    (root / "job/cpu.cfs_quota_us").write_text("25000\n")
    (root / "job/cpu.cfs_period_us").write_text("50000\n")
    (root / "job/cpu.stat").write_text("nr_periods 1\nnr_throttled 1\nthrottled_time 5\n")
    groups = ControlGroups(
        proc_with(tmp_path, 7, mounts=V1_MOUNT.format(root), groups="4:memory:/else\n2:cpu,cpuacct:/job\n")
    )
    assert not groups.new_throttling([7], SECOND_NS)
    (root / "job/cpu.stat").write_text("nr_periods 2\nnr_throttled 2\nthrottled_time 905\n")
    (throttled,) = groups.new_throttling([7], 2 * SECOND_NS)
    assert (throttled.quota, throttled.n, throttled.ns) == ("cpu.cfs_quota_us 25000/50000", 1, 900)


def test_a_device_name_is_its_disk_or_its_mount_source(tmp_path: Path):
    disks = tmp_path / "sys/dev/block"
    disks.mkdir(parents=True)
    (disks / "8:1").symlink_to("../../devices/pci/block/sda/sda1")
    mounts = "40 24 0:51 / /data rw - nfs4 nas:/my\\040data rw\n41 24 0:52 / / rw - overlay overlay rw\n"
    devices = Devices(tmp_path / "sys", proc_with(tmp_path, 7, mounts=mounts))
    assert devices.name(8 << 20 | 1, 7) == "sda1"
    assert devices.name(51, 7) == "nas:/my data (nfs4)"
    assert devices.name(52, 7) == "overlay"
    assert devices.name(53, 7) == "0:53"


def test_only_the_traced_own_sockets(tmp_path: Path):
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "8/fd").mkdir(parents=True)
    (tmp_path / "7/fd/3").symlink_to("socket:[100]")
    (tmp_path / "8/fd/3").symlink_to("socket:[200]")
    owners = SocketOwners(tmp_path)
    assert owners.owners([100, 200], [7], 0) == {100: 7}
    (tmp_path / "7/fd/4").symlink_to("socket:[200]")
    assert owners.owners([100, 200], [7], SECOND_NS) == {100: 7}
    assert owners.owners([100, 200], [7], 20 * SECOND_NS) == {100: 7, 200: 7}


def test_an_inherited_socket_belongs_to_the_first_listed_process(tmp_path: Path):
    """The traced processes are searched before their descendants, such as data loaders."""
    for pid in (7, 8, 9):
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/fd/3").symlink_to("socket:[100]")
    assert SocketOwners(tmp_path).owners([100], [7, 8, 9], 0) == {100: 7}


@pytest.mark.parametrize(
    ("family", "address", "message"),
    [
        (socket.AF_INET, "10.1.2.3", "10.1.2.3:443"),
        (socket.AF_INET6, "fd00::1", "[fd00::1]:443"),
        (socket.AF_INET6, "::ffff:10.1.2.3", "10.1.2.3:443"),
    ],
)
def test_the_peer_address_is_in_the_conventional_notation(family: int, address: str, message: str):
    packed = struct.pack("<H", family) + struct.pack(">H", 443) + bytes(4)
    packed += socket.inet_pton(family, address).ljust(16, b"\0")
    assert peer_address(np.frombuffer(packed, kernel.ENDS)[0]) == message


@pytest.mark.parametrize(("code", "message"), [(0, 0), (3 << 8, 3), (9, 137), (11 | 0x80, 139)])
def test_the_exit_status_follows_the_shell_convention(code: int, message: int):
    assert exit_status(code) == message


def test_a_refused_program_is_replaced_by_its_alternative():
    optional = OptionalPrograms()
    assert {"block_start", "host_victim"} <= set(optional.programs())
    assert optional.give_up(["block_done"])
    assert {"block_issue", "block_complete"} <= set(optional.programs()) and not optional.missing()
    assert optional.give_up(["block_issue"])
    assert optional.missing() == ("requests to disks",)
    assert not optional.give_up(["on_switch"])
    assert len({name for feature in FEATURES for way in feature.alternatives for name in way}) == sum(
        len(way) for feature in FEATURES for way in feature.alternatives
    )


def test_calls_into_the_driver_are_an_optional_feature():
    assert not set(IOCTL_WAYS["function"]) & set(OptionalPrograms().programs())
    asked = driver_calls(IOCTL_WAYS)
    optional = OptionalPrograms((*FEATURES, asked))
    assert optional.programs_of(asked) == IOCTL_WAYS["function"]
    assert optional.give_up(["ioctl_leave"]) and optional.programs_of(asked) == IOCTL_WAYS["tracepoint"]
    assert not optional.missing()
    assert optional.give_up(["ioctl_enter_any"]) and optional.programs_of(asked) == ()
    assert optional.missing() == ("calls into the GPU driver",)
