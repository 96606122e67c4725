"""A virtual machine with a given kernel: QEMU without KVM, and all requirements of a run in its initramfs.

The initramfs contains busybox, this Python with its standard library, the imports of stallscope and its emulated job,
their shared libraries, and stallscope, compiled, with the built BPF object. The machine runs one script and ends. Every
instruction is emulated, so this file does as much of the work as possible.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

INSIDE = Path(__file__).parent / "inside.py"
BOOT_S = 900
_CPU = "Nehalem"
"""x86-64-v2, which numpy asks for; with AVX, which is emulated slowly, a run takes a quarter longer."""
_BOOT = "console=ttyS0 quiet panic=-1 mitigations=off rcupdate.rcu_expedited=1 no_timer_check nowatchdog"
"""Mitigations cost an emulated CPU a sixth of the run; to unhook a function waits for a grace period of RCU. The last
two: on a busy host, a late timer is not a fault.
"""
_LEFT_OUT = (
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "ensurepip",
    "lib2to3",
    "config-*",
    "turtledemo",
    "_tkinter.*",
    "_test*.so",
    "*.opt-*.pyc",
    "*.pyi",
    "*.a",
)
_IMPORTED = """
import sys, stallscope.agent, stallscope.demo.job, stallscope.demo.live_demo
import stallscope.diagnose.engine, stallscope.store.node
from stallscope.cli import app
try:
    app(["trace", "--help"])  # loads the modules that the command line needs to parse options
except SystemExit:
    print(*(each.__file__ for each in sys.modules.values() if getattr(each, "__file__", None)), sep="\\n")
"""
_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
mkdir -p /dev/shm /tmp; mount -t tmpfs none /dev/shm; mount -t tmpfs none /tmp
mount -t tracefs none /sys/kernel/tracing; mount -t cgroup2 none /sys/fs/cgroup; ip link set lo up
export PATH=/bin HOME=/tmp XDG_CACHE_HOME=/cache PYTHONPATH=/src:/site PYTHONDONTWRITEBYTECODE=1
{python} -P /inside.py 2>&1
poweroff -f
"""


def initramfs(root: Path, source: Path, emulated: Path) -> Path:
    """Builds it. root: a folder of its own. source: `src`. emulated: the built libraries. Returns its file: 150 MB."""
    tree = root / "tree"
    for name in ("bin", "proc", "sys", "dev", "tmp", "site", "cache/stallscope"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    shutil.copy2(shutil.which("busybox") or "", tree / "bin/busybox")
    python = Path(sys.base_prefix) / f"bin/python3.{sys.version_info.minor}"
    standard = Path(sysconfig.get_paths()["stdlib"])
    _copy(python, tree)
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(standard, tree / str(standard)[1:], ignore=left_out, dirs_exist_ok=True)
    shutil.copytree(source / "stallscope", tree / "src/stallscope")
    shutil.copytree(emulated, tree / "cache/stallscope" / emulated.name)
    for each in _imported(source):
        there = tree / "site" / each.name
        shutil.copytree(each, there, ignore=left_out) if each.is_dir() else shutil.copy2(each, there)
    shutil.copy2(INSIDE, tree / "inside.py")
    binaries = [python, *tree.rglob("*.so*"), _found("libbpf.so.1"), _found("libgcc_s.so.1")]
    for library in _libraries(path for path in binaries if path.is_file()):
        _copy(library, tree)
    (tree / "init").write_text(_INIT.format(python=python))
    (tree / "init").chmod(0o755)
    compileall.compile_dir(
        tree / "src",
        quiet=1,
        stripdir=tree,
        prependdir="/",
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )
    file = packed(tree, root / "initramfs")
    shutil.rmtree(tree)
    return file


def output(
    kernel: Path, initramfs: Path, *, timeout_s: float = BOOT_S, memory_mb: int = 1500, cpu: str = _CPU
) -> str:
    """The output of the script inside on this kernel (a vmlinuz).

    One CPU: with two, Linux 6.12 crashes in the emulation while it patches its own code.
    """
    command = ["nice", "-n", "5", "qemu-system-x86_64", "-kernel", str(kernel), "-initrd", str(initramfs)]
    command += ["-append", _BOOT, "-nographic", "-no-reboot"]
    command += ["-m", str(memory_mb), "-smp", "1", "-cpu", cpu, "-nic", "none"]
    done = subprocess.run(
        command, stdin=-3, capture_output=True, text=True, timeout=timeout_s, errors="replace"
    )
    return done.stdout + done.stderr


def _imported(source: Path) -> set[Path]:
    """The files and folders of site-packages that the programs inside load."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORTED], capture_output=True, text=True, check=True, env=environment
    )
    result = set()
    for line in done.stdout.splitlines():
        before, is_site, after = line.partition("/site-packages/")
        if is_site:
            result.add(Path(before) / "site-packages" / after.split("/")[0])
    libraries = {each.with_name(f"{each.name}.libs") for each in result}
    return result | {each for each in libraries if each.is_dir()}


def _found(name: str) -> Path:
    """A shared library by the name that the loader knows it by."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    match = re.search(rf"^\s*{re.escape(name)} .*x86-64.* => (\S+)$", known, re.MULTILINE)
    return Path(match[1] if match else "none")


def _libraries(binaries: Iterable[Path]) -> set[Path]:
    """These and all the shared libraries of the system that they need."""
    wanted = set(binaries)
    done = subprocess.run(["ldd", *map(str, wanted)], capture_output=True, text=True, check=False)
    needed = re.findall(r"(?:=> |^\s)(/\S+) \(0x", done.stdout, re.MULTILINE)
    return {Path(path) for path in needed} | {path for path in wanted if str(path).startswith("/lib")}


def _copy(path: Path, tree: Path) -> None:
    """Into the tree, at the same place; a link as the file that it is one to."""
    there = tree / str(path)[1:]
    if not there.exists() and not str(path).startswith(str(tree)):
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, there)


def packed(tree: Path, file: Path) -> Path:
    """The folder as an initramfs. Returns its file."""
    names = "\0".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    command = ["cpio", "--null", "--create", "--format=newc", "--quiet"]
    done = subprocess.run(command, input=names.encode(), capture_output=True, check=True, cwd=tree)
    file.write_bytes(done.stdout)
    return file
