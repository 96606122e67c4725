"""A file for support: the check results, the machine, the settings, and the trace's tables; no data about the job.

Command lines and environment values are not read. Host and user names are replaced unless requested.
"""

import gzip
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stallscope import __version__
from stallscope.check.gpus import driver_version
from stallscope.errors import StallscopeError, writing
from stallscope.settings import Effective, named, shown
from stallscope.store.file_modes import replace
from stallscope.store.node import reading

_PACKAGES = (
    "numpy",
    "typer",
    "rich",
    "pyyaml",
    "pyarrow",
    "duckdb",
    "mcp",
    "perfetto",
    "grpcio",
    "nvidia-ml-py",
)
_XID = re.compile(r"NVRM: (?:Xid|GPU at)")
_MAX_LINES = 200


def write(path: Path, answer: Mapping[str, Any], chosen: Effective, *, with_names: bool = False) -> list[str]:
    """Write the bundle (tar.gz), readable by its owner only; equal facts give equal bytes.

    answer: the result of readiness.as_json(). Returns the names of the files in it. Raises StorageFailed.
    """
    contents = {
        "check.json": answer,
        "machine.json": _machine(),
        "settings.json": {
            name: {"value": str(shown(named(name), getattr(chosen.settings, name))), "from": origin}
            for name, origin in sorted(chosen.origins.items())
        },
        "trace.json": _trace(chosen.settings.db),
        "xid.json": _xid(),
    }
    words = [] if with_names else names(chosen)
    texts = {
        name: redacted(json.dumps(output, indent=1), words, with_names=with_names)
        for name, output in contents.items()
    }
    with writing(path, "choose another path with --bundle"):
        replace(path, _packed(texts))
    return list(texts)


def names(chosen: Effective) -> list[str]:
    """The names of machines that may occur in the texts, the longest first."""
    hub = chosen.settings.hub.rpartition(":")[0]
    result = {platform.node(), platform.node().partition(".")[0], chosen.settings.node, hub}
    with suppress(StallscopeError), reading(chosen.settings.db) as db:
        result |= {name for (name,) in db.execute("SELECT name FROM nodes")}
    return sorted(result - {"", "localhost"}, key=lambda name: (-len(name), name))


def redacted(text: str, hosts: Iterable[str], *, with_names: bool = False) -> str:
    """The text with host names, user names and addresses replaced, each always by the same word."""
    if with_names:
        return text
    for number, name in enumerate(hosts, 1):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"host-{number}", text)
    text = re.sub(r"/home/[^/\s\"]+", "/home/user", text)
    text = re.sub(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", "address", text)
    return re.sub(r"[\w.+-]+@[\w-]+\.[\w.-]+", "mail-address", text)


def _machine(proc: Path = Path("/proc")) -> dict[str, Any]:
    return {
        "stallscope": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "n_cpus": os.cpu_count(),
        "memory_kb": _first_number(proc / "meminfo"),
        "driver": driver_version(proc),
        "packages": {name: result for name in _PACKAGES if (result := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_number(path: Path) -> int | None:
    try:
        match = re.search(r"\d+", path.read_text())
    except OSError:
        return None
    return int(match[0]) if match else None


def _trace(db: Path) -> dict[str, Any]:
    """The rows of each table, the sessions and the losses; or the reason why the trace cannot be read."""
    try:
        with reading(db) as connection:
            tables = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1"
                )
            ]
            sessions = connection.execute("SELECT started_ns, ended_ns, source, version, facts FROM sessions")
            return {
                "bytes": db.stat().st_size,
                "rows": {
                    name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables
                },
                "sessions": [
                    {"started_ns": a, "ended_ns": b, "source": c, "version": d, "facts": _without_boot(e)}
                    for a, b, c, d, e in sessions
                ],
                "lost": dict(connection.execute("SELECT kind, SUM(n_lost) FROM losses GROUP BY kind")),
            }
    except StallscopeError as error:
        return {"error": str(error)}


def _without_boot(facts: str) -> dict[str, Any]:
    """The facts without the boot id, which would identify the machine."""
    return {name: value for name, value in json.loads(facts).items() if name != "boot_id"}


def _xid(log: Path = Path("/dev/kmsg")) -> list[str]:
    """Errors that the NVIDIA driver has logged; empty if the kernel's log may not be read."""
    lines: list[str] = []
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    try:
        while True:
            line = os.read(fd, 8192).decode(errors="replace")
            if not line:
                break
            if _XID.search(line):
                lines.append(line.partition(";")[2].strip())
    except BlockingIOError:
        pass
    except OSError:
        lines.append("the kernel's log was cut off here")
    finally:
        os.close(fd)
    return lines[-_MAX_LINES:]


def _packed(texts: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, text in texts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"stallscope/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
