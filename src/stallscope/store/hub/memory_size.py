"""The memory of this machine and of this process."""

import os
from contextlib import suppress
from pathlib import Path

_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_DEFAULT_SHARE = 4
_MIN_BYTES = 1 << 30


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def default_bytes() -> int:
    """Default memory limit of a hub: a quarter of the machine's memory, or of the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or a container without a limit
        total = min(total, int(_CGROUP.read_text()))
    return max(_MIN_BYTES, total // _DEFAULT_SHARE)
