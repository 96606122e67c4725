"""The NCCL and CUDA libraries in running processes, and the Python versions of these processes."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from stallscope.capture.probes import Discovery, Library, NotElf, elf, functions, operations
from stallscope.check.finding import Finding, passed, warned
from stallscope.events.counted import counted

_MAX_NAMES = 8
_PYTHON = re.compile(r"python(\d\.\d+)")


def findings(proc: Path = Path("/proc"), *, ignored: frozenset[int] = frozenset()) -> Iterator[Finding]:
    """Each library file in use, and the versions of Python in the processes that use GPU libraries.

    ignored: processes that are left out, first of all stallscope's process.
    """
    discovery = Discovery(proc=proc, ignored=ignored)
    libraries = discovery.scan(0)
    users = discovery.gpu_processes()
    if users:
        names = ", ".join(f"{_command(proc, pid)} {pid}" for pid in users[:_MAX_NAMES])
        more = f" and {len(users) - _MAX_NAMES} more" if len(users) > _MAX_NAMES else ""
        yield passed("GPU processes", f"{counted(len(users), 'process')}: {names}{more}")
    remedy = _remedy_for_unreadable(proc)
    n_unreadable = unreadable_processes(proc) if remedy else 0
    if n_unreadable:
        yield warned("libraries", f"{counted(n_unreadable, 'process')} cannot be examined", remedy)
    elif not libraries:
        yield warned("libraries", "no process has NCCL or CUDA loaded now", "start the job, and check again")
    for library in libraries:
        yield _library(proc, library)
    yield from _pythons(proc, users)


def _remedy_for_unreadable(proc: Path) -> str:
    """The remedy where this user may not read every process; empty for root without a confining profile."""
    if os.geteuid() != 0:
        return "include the processes of other users: sudo stallscope check"
    try:
        is_confined = "(enforce)" in (proc / "self/attr/current").read_text()
    except OSError:
        is_confined = False
    return (
        "the AppArmor profile forbids it: docker run --security-opt apparmor=unconfined"
        if is_confined
        else ""
    )


def unreadable_processes(proc: Path) -> int:
    """The number of processes whose mappings this user may not read; kernel threads have no command line."""
    n_processes = 0
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "cmdline").read_bytes():
                (entry / "maps").open("rb").close()
        except PermissionError:
            n_processes += 1
        except OSError:
            continue  # the process has ended
    return n_processes


def _command(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "process"


def _library(proc: Path, library: Library) -> Finding:
    where = _environment(proc, library)
    subject = Path(library.name).name
    try:
        with elf.open_image(library.path) as image:
            n_found = len(functions(image, operations.names(), is_static=library.is_static))
    except (OSError, NotElf) as error:
        return warned(subject, f"{where}: {error}", "its calls are not traced: run check as root")
    if not n_found:
        return warned(
            subject,
            f"{where}: none of the functions to trace",
            "an unsupported version, or a stripped library",
        )
    return passed(subject, f"{where}: {n_found} functions to trace")


def _environment(proc: Path, library: Library) -> str:
    """The process that uses the library, and its kind of environment."""
    kinds = [
        "linked into the program" if library.is_static else "",
        "in a container" if _is_in_container(proc, library.pid) else "",
        "in a virtual environment" if "/site-packages/" in library.name else "",
    ]
    labels = ", ".join(kind for kind in kinds if kind)
    return f"process {library.pid}{f' ({labels})' if labels else ''}"


def _is_in_container(proc: Path, pid: int) -> bool:
    """Whether the process has another root of the file system than the first process."""
    try:
        return (proc / str(pid) / "ns/mnt").readlink() != (proc / "1/ns/mnt").readlink()
    except OSError:
        return False


def _pythons(proc: Path, pids: tuple[int, ...]) -> Iterator[Finding]:
    versions: Counter[str] = Counter()
    names: defaultdict[str, set[str]] = defaultdict(set)
    for pid in pids:
        version = python_version(proc, pid)
        if version:
            versions[version] += 1
            names[version].add(str(pid))
    for version, n in sorted(versions.items()):
        yield passed("Python", f"{version} in {counted(n, 'process')} that use a GPU")


def python_version(proc: Path, pid: int) -> str:
    """The version of the interpreter that a process runs, as "3.11"; empty without Python."""
    try:
        maps = (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return ""
    files = {line.split(None, 5)[5] for line in maps.splitlines() if line.count("/")}
    libraries = [_PYTHON.search(Path(name).name) for name in sorted(files)]
    return next((match[1] for match in libraries if match), "")
