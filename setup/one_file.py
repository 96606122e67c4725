"""Builds stallscope.pyz for several versions of Python: one_file.py OUT WHEEL EXTRAS MACHINE VERSION...

Compiled modules carry the version of Python in their names, so the packages of all versions fit in one folder. All
other files must be equal: a difference is an error, except in descriptions of the build.
"""

import filecmp
import shutil
import stat
import sys
import tempfile
import zipfile
from pathlib import Path

from own_python import PIP, remove_build_paths, run

_BUILD_DESCRIPTION = "__config__.py"
_UNUSED = ("tests", "__pycache__", "bin", "include")
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
_PREAMBLE = """\
import sys
if not ({oldest} <= sys.version_info[:2] <= {newest}):
    sys.exit("stallscope: this file needs Python {first} to {last}, and this is Python %d.%d; "
             "use the file with its own Python (stallscope-{machine})" % sys.version_info[:2])
"""


def build(out: Path, wheel: Path, extras: str, machine: str, versions: list[str]) -> None:
    """Write the file. Raises SystemExit with the failed command, or the differing file."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pins = scratch / "pins.txt"
        pins.touch()
        packages = scratch / "packages"
        for version in versions:
            folder = scratch / version
            _install(folder, f"{wheel}[{extras}]", machine, version, pins)
            if not pins.stat().st_size:
                pins.write_text("".join(f"{each}\n" for each in _versions_in(folder)))
            _merge(folder, packages)
        preamble = scratch / "preamble.py"
        first, last = versions[0], versions[-1]
        preamble.write_text(
            _PREAMBLE.format(oldest=_pair(first), newest=_pair(last), first=first, last=last, machine=machine)
        )
        shiv = Path(sys.executable).parent / "shiv"
        run(
            *(shiv, "--reproducible", "--no-modify", "--console-script", "stallscope"),
            *("--python", "/usr/bin/env python3", "--site-packages", packages),
            *("--preamble", preamble, "--output-file", scratch / out.name),
        )
        _normalise(scratch / out.name, out)


def _normalise(archive: Path, out: Path) -> None:
    """Copy an archive with its entries by name: shiv takes the order and the modes of its own files from its
    installation, so builds by two installations would differ.
    """
    with archive.open("rb") as file, out.open("wb") as target, zipfile.ZipFile(archive) as old:
        target.write(file.readline())  # the line that names the interpreter
        with zipfile.ZipFile(target, "w") as new:
            for name in sorted(old.namelist()):
                entry = zipfile.ZipInfo(name, old.getinfo(name).date_time)
                entry.compress_type = zipfile.ZIP_DEFLATED
                executable = (old.getinfo(name).external_attr >> 16) & stat.S_IXUSR
                entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
                new.writestr(entry, old.read(name))
    out.chmod(0o755)


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _install(folder: Path, requirement: str, machine: str, version: str, pins: Path) -> None:
    platforms = [word for each in _PLATFORMS for word in ("--platform", f"{each}_{machine}")]
    run(
        *(*PIP, "--target", folder, "--python-version", version, *platforms),
        *("--constraint", pins, requirement),
    )
    remove_build_paths(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and path.name in _UNUSED:
            shutil.rmtree(path)


def _versions_in(folder: Path) -> list[str]:
    """`name==version` of each installed package except stallscope itself."""
    names = [path.name.removesuffix(".dist-info").split("-") for path in sorted(folder.glob("*.dist-info"))]
    return [f"{name}=={version}" for name, version in names if name != "stallscope"]


def _merge(folder: Path, packages: Path) -> None:
    for path in sorted(folder.rglob("*")):
        target = packages / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():
            shutil.copy2(path, target)
        elif _describes_the_build(path) or filecmp.cmp(path, target, shallow=False):
            continue
        else:
            raise SystemExit(f"setup: {path.relative_to(folder)} differs between versions of Python")


def _describes_the_build(path: Path) -> bool:
    return path.name == _BUILD_DESCRIPTION or any(part.endswith(".dist-info") for part in path.parts)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
