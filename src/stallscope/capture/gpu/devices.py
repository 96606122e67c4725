"""Names of disks and file systems, by kernel device number.

A network file system or an overlay has a device number of its own. The table of mounts gives its type and source.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

_MINOR_BITS = 20
"""linux/kdev_t.h"""

_MAX_MOUNTS = 4096
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass
class Devices:
    """sys, proc: the mount points of sysfs and procfs."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    _names: dict[tuple[int, int], str] = field(default_factory=dict)

    def name(self, device: int, pid: int) -> str:
        """The disk name, or the type and source of the mount in the process's view; otherwise MAJOR:MINOR."""
        number = f"{device >> _MINOR_BITS}:{device & (1 << _MINOR_BITS) - 1}"
        key = device, 0 if device >> _MINOR_BITS else pid
        if key not in self._names:
            if len(self._names) > _MAX_MOUNTS:
                self._names.clear()
            self._names[key] = self._disk(number) or self._mount(number, pid) or number
        return self._names[key]

    def _disk(self, number: str) -> str:
        path = self.sys / "dev/block" / number
        try:
            dm = path / "dm/name"
            return dm.read_text().strip() if dm.exists() else path.readlink().name
        except OSError:
            return ""

    def _mount(self, number: str, pid: int) -> str:
        try:
            text = (self.proc / str(pid) / "mountinfo").read_text()
        except OSError:
            return ""
        for line in text.splitlines():
            mount, _, file_system = line.partition(" - ")
            if mount.split()[2] == number:
                kind, source = file_system.split()[:2]
                source = _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), source)
                return kind if source in (kind, "none") else f"{source} ({kind})"
        return ""
