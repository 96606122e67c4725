"""Control groups and networks for one test: created with limits, and removed with the test."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_DROPS_ALL = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
SEC("xdp") int drops_all(struct xdp_md *packet) { return XDP_DROP; }
char LICENSE[] SEC("license") = "Dual BSD/GPL";
"""


@contextmanager
def group(version: int, controller: str, limits: Mapping[str, str]) -> Iterator[Path]:
    """A control group with limits; skips where this machine has none of that version with the controller."""
    root = _mounted(version, controller)
    if root is None:
        pytest.skip(f"other: no control groups of version {version} with {controller}")
    if version == 2:
        (root / "cgroup.subtree_control").write_text(f"+{controller}")
    home = root / f"stallscope-test-{os.getpid()}"
    home.mkdir()
    try:
        for name, value in limits.items():
            (home / name).write_text(value)
        yield home
    finally:
        for pid in (home / "cgroup.procs").read_text().split():
            (home.parent / "cgroup.procs").write_text(pid)
        for _ in range(100):
            try:
                home.rmdir()
                break
            except OSError:
                time.sleep(0.05)  # those killed in it are still ending


def join(home: Path, pid: int) -> None:
    """Move a process into the group."""
    (home / "cgroup.procs").write_text(str(pid))


def versions(controller: str) -> list[int]:
    """The versions of control groups that this machine has with the controller: it has one of them at a time."""
    return [version for version in (1, 2) if _mounted(version, controller)]


def _mounted(version: int, controller: str) -> Path | None:
    kind = "cgroup2" if version == 2 else "cgroup"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, path, result, options, *_ = line.split()
        if result != kind:
            continue
        if version == 1 and controller in options.split(","):
            return Path(path)
        if version == 2 and controller in (Path(path) / "cgroup.controllers").read_text().split():
            return Path(path)
    return None


class Network:
    """Two connected network namespaces; packets that arrive at the second can be dropped."""

    def __init__(self, folder: Path):
        self.near, self.far = (f"stallscope-{os.getpid()}-{end}" for end in ("near", "far"))
        self._program = folder / "drops_all.o"
        source = folder / "drops_all.c"
        source.write_text(_DROPS_ALL)
        headers = "-I/usr/include/x86_64-linux-gnu"
        subprocess.run(
            ["clang", "-O2", "-g", "-target", "bpf", headers, "-c", source, "-o", self._program], check=True
        )
        for name in (self.near, self.far):
            _ip("netns", "add", name)
        _ip("-n", self.near, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", self.far)
        for name, number in ((self.near, 1), (self.far, 2)):
            for version, address in (("-4", f"10.77.0.{number}/30"), ("-6", f"fd77::{number}/64")):
                quick = ["nodad"] if version == "-6" else []
                _ip("-n", name, version, "addr", "add", address, "dev", "wire", *quick)
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def drop_all(self) -> None:
        """Drop all packets that arrive at the far end."""
        _ip(
            "-n",
            self.far,
            "link",
            "set",
            "dev",
            "wire",
            "xdpgeneric",
            "obj",
            str(self._program),
            "sec",
            "xdp",
        )

    def close(self) -> None:
        for name in (self.near, self.far):
            _ip("netns", "del", name)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Skips without the `ip` command."""
    if not shutil.which("ip"):
        pytest.skip("other: no ip command (iproute2)")
    result = Network(folder)
    try:
        yield result
    finally:
        result.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
