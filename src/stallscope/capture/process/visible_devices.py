"""Maps a process's own device numbers to the GPUs of the machine.

CUDA_VISIBLE_DEVICES and containers hide GPUs from a process, which numbers the remaining GPUs from 0. Variables that a
process sets after its start are not visible here. The mapping is exact if all GPUs are of one model: CUDA orders
different models by speed unless CUDA_DEVICE_ORDER is set, and the speeds are not known here.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FILE = re.compile(r"nvidia(\d{1,4})")
_UUID = re.compile(r"(GPU|MIG)-.+")
_KERNEL_FILE_SYSTEMS = ("devtmpfs", "tmpfs")
"""File systems of /dev that answer immediately and that a tenant cannot make block."""


@dataclass(frozen=True)
class GpuNumbers:
    """Numbers of this machine's GPUs as their driver counts them, by the number of their device file and by UUID.

    The UUID of a partition maps to its GPU. A GPU without a known number has the number of its device file.
    """

    by_file: Mapping[int, int] = field(default_factory=dict)
    by_uuid: Mapping[str, int] = field(default_factory=dict)

    def of_file(self, number: int) -> int:
        """The GPU number for /dev/nvidiaN."""
        return self.by_file.get(number, number)


def visible_gpus(process_dir: Path, variables: Mapping[str, str], numbers: GpuNumbers) -> tuple[int, ...]:
    """Numbers of the GPUs that a process (its folder in /proc) sees, in its own order; empty if unknown."""
    files = _device_files(process_dir)
    all_gpus = tuple(numbers.of_file(number) for number in files)
    setting = variables.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return all_gpus
    gpus: list[int] = []
    for word in map(str.strip, setting.split(",")):
        if _UUID.fullmatch(word):
            matches = {number for uuid, number in numbers.by_uuid.items() if uuid.startswith(word)}
            if len(matches) != 1:
                return ()
            gpus += matches
        elif re.fullmatch(r"[0-9]{1,4}", word) and (not all_gpus or int(word) < len(all_gpus)):
            gpus.append(all_gpus[int(word)] if all_gpus else int(word))
        else:
            break  # as in CUDA: an invalid entry hides all entries after it
    return tuple(gpus)


def _device_files(process_dir: Path) -> list[int]:
    """N of each /dev/nvidiaN in the process's own root."""
    try:
        mounts = [
            line.split() for line in (process_dir / "mountinfo").read_text(errors="replace").splitlines()
        ]
    except OSError:
        return []
    kinds = [words[words.index("-") + 1] for words in mounts if words[4] == "/dev" and "-" in words]
    if not kinds or kinds[-1] not in _KERNEL_FILE_SYSTEMS:
        return []
    return sorted(int(match[1]) for name in _names(process_dir) if (match := _FILE.fullmatch(name)))


def _names(process_dir: Path) -> list[str]:
    flags = os.O_DIRECTORY | os.O_CLOEXEC
    try:
        root = os.open(process_dir / "root", os.O_PATH | flags)
    except OSError:
        return []
    try:
        folder = os.open("dev", os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=root)
    except OSError:
        return []
    finally:
        os.close(root)
    try:
        return os.listdir(folder)  # noqa: PTH208 (of a descriptor)
    finally:
        os.close(folder)
