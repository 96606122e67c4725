"""Limits of a control group for processes: a CPU quota, or a slow disk. With control groups of version 1 and 2."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 1_000_000


@contextlib.contextmanager
def cpu_quota(pids: list[int], quota_us: int) -> Iterator[None]:
    """Limit the CPU time of processes in each second."""
    parent = _version_1("cpu")
    settings = {"cpu.max": f"{quota_us} {PERIOD_US}"}
    if parent:
        settings = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
    with _group(parent or _version_2("cpu"), pids, settings):
        yield


@contextlib.contextmanager
def slow_disk(pids: list[int], path: Path, bytes_per_s: int) -> Iterator[None]:
    """Limit how fast processes read from the disk of a path."""
    parent, disk = _version_1("blkio"), _disk_of(path)
    settings = {"io.max": f"{disk} rbps={bytes_per_s}"}
    if parent:
        settings = {"blkio.throttle.read_bps_device": f"{disk} {bytes_per_s}"}
    with _group(parent or _version_2("io"), pids, settings):
        yield


@contextlib.contextmanager
def _group(parent: Path, pids: list[int], settings: dict[str, str]) -> Iterator[None]:
    folder = parent / f"prove-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        for name, value in settings.items():
            (folder / name).write_text(value)
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(pid)
        time.sleep(0.1)
        with contextlib.suppress(OSError):  # a process that has just ended
            folder.rmdir()


def _mounts() -> list[tuple[Path, str, list[str]]]:
    """Folder, kind and options of each mounted hierarchy."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(Path(line[1]), line[2], line[3].split(",")) for line in lines if line[2].startswith("cgroup")]


def _version_1(controller: str) -> Path | None:
    """The hierarchy of version 1 with a controller."""
    return next(
        (folder for folder, kind, options in _mounts() if kind == "cgroup" and controller in options), None
    )


def _version_2(controller: str) -> Path:
    """The hierarchy of version 2, with a controller for its groups.

    A kernel with CONFIG_RT_GROUP_SCHED refuses processes of real-time priority in groups with the controller cpu.
    """
    root = next((folder for folder, kind, _ in _mounts() if kind == "cgroup2"), None)
    if root is None:
        raise SystemExit("no control groups are mounted")
    (root / "cgroup.subtree_control").write_text(f"+{controller}")
    return root


def _disk_of(path: Path) -> str:
    device = path.stat().st_dev
    whole = (Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}").resolve()
    disk = whole.parent if (whole / "partition").exists() else whole
    return (disk / "dev").read_text().strip()
