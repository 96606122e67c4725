"""The commands that this machine's distribution uses to repair a finding, by the names in /etc/os-release."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Commands(NamedTuple):
    """One family of distributions. install: precedes names of packages. kernel: installs the newest kernel.

    driver: installs NVIDIA's driver. lockdown: removes the lockdown from the kernel's command line.
    """

    install: str
    kernel: str
    driver: str
    lockdown: str


_EDIT_GRUB = "remove lockdown=confidentiality from GRUB_CMDLINE_LINUX in /etc/default/grub, and"
_FAMILIES = {
    "ubuntu": Commands(
        "apt-get install",
        "apt-get install linux-image-generic",
        "ubuntu-drivers install --gpgpu",
        f"{_EDIT_GRUB} run: update-grub",
    ),
    "debian": Commands(
        "apt-get install",
        "apt-get install linux-image-amd64",
        "apt-get install nvidia-driver",
        f"{_EDIT_GRUB} run: update-grub",
    ),
    "fedora": Commands(
        "dnf install",
        "dnf upgrade kernel",
        "dnf install nvidia-driver nvidia-driver-cuda",
        "run: grubby --update-kernel=ALL --remove-args=lockdown=confidentiality",
    ),
    "suse": Commands(
        "zypper install",
        "zypper update kernel-default",
        "zypper install nvidia-open-driver-G06-signed-kmp-default nvidia-compute-utils-G06",
        f"{_EDIT_GRUB} run: grub2-mkconfig -o /boot/grub2/grub.cfg",
    ),
    "alpine": Commands(
        "apk add", "apk upgrade linux-lts", "apk add nvidia-driver", f"{_EDIT_GRUB} run: update-grub"
    ),
    "arch": Commands(
        "pacman -S",
        "pacman -Syu linux",
        "pacman -S nvidia-open",
        f"{_EDIT_GRUB} run: grub-mkconfig -o /boot/grub/grub.cfg",
    ),
}
_ALSO = {
    "rhel": "fedora",
    "centos": "fedora",
    "rocky": "fedora",
    "almalinux": "fedora",
    "amzn": "fedora",
    "ol": "fedora",
    "opensuse": "suse",
    "sles": "suse",
}
_RELEASE = Path("/etc/os-release")


def commands(release: Path = _RELEASE) -> Commands:
    """The commands of this machine; of Debian for an unknown distribution."""
    try:
        lines = dict(
            line.split("=", 1) for line in release.read_text(errors="replace").splitlines() if "=" in line
        )
    except OSError:
        return _FAMILIES["debian"]
    names = [lines.get("ID", ""), *lines.get("ID_LIKE", "").replace('"', "").split()]
    for name in (name.strip("\"'") for name in names):
        family = _ALSO.get(name, name)
        if family in _FAMILIES:
            return _FAMILIES[family]
    return _FAMILIES["debian"]
