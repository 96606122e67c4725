"""What every test may ask for, and which tests this machine cannot run.

A test says with a marker what it needs: `bpf`, `compiler`, `gpu` or `shared`. Where that is missing the test
is skipped with the reason, and the reasons are counted at the end of the run.
"""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stallscope.cli import main

ROOT = Path(__file__).resolve().parent.parent


def data_folder() -> Path:
    """The folder with recordings and public data: $STALLSCOPE_DATA, or `shared` beside the repository."""
    return Path(os.environ.get("STALLSCOPE_DATA") or ROOT.parent / "shared").resolve()


def _missing_for_shared() -> str | None:
    folder = data_folder() / "recordings"
    return None if folder.is_dir() else "no recordings: STALLSCOPE_DATA names no folder that holds them"


def _missing_for_bpf() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "this kernel has no BTF (/sys/kernel/btf/vmlinux)"
    if not shutil.which("clang"):
        return "no clang: the BPF programs cannot be built"
    return None


def _missing_for_gpu() -> str | None:
    return None if Path("/dev/nvidia0").exists() else "no NVIDIA GPU (/dev/nvidia0)"


def _missing_for_compiler() -> str | None:
    absent = [tool for tool in ("gcc", "nm", "readelf", "strip") if not shutil.which(tool)]
    return f"no {absent[0]} to build the libraries that are looked at" if absent else None


_MISSING_FOR = {
    "shared": _missing_for_shared,
    "bpf": _missing_for_bpf,
    "gpu": _missing_for_gpu,
    "compiler": _missing_for_compiler,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test whose need is not met."""
    for marker, missing in _MISSING_FOR.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(f"{marker}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skips by what was missing; the reasons themselves come from -ra."""
    reports = terminalreporter.stats.get("skipped", [])
    if not reports:
        return
    reasons = [report.longrepr[2] if isinstance(report.longrepr, tuple) else "" for report in reports]
    words = [reason.removeprefix("Skipped: ").split(":", 1)[0] for reason in reasons]
    counts = Counter(word if word in _MISSING_FOR else "other" for word in words)
    said = ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
    terminalreporter.write_line(f"not run for want of: {said}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with recordings and public data; skips where there is none."""
    if reason := _missing_for_shared():
        pytest.skip(f"shared: {reason}")
    return data_folder()


@pytest.fixture(scope="session")
def recordings(shared: Path) -> Path:
    """The folder that holds one folder per recording; skips where there is none."""
    return shared / "recordings"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return ROOT


@pytest.fixture(scope="session")
def our_files() -> list[Path]:
    """Every file of the working tree that people write: no hidden folders but .ci, nothing that is built."""
    found = []
    for folder, below, files in os.walk(ROOT):
        below[:] = sorted(b for b in below if b == ".ci" or not b.startswith("."))
        below[:] = [b for b in below if b not in ("__pycache__", "build", "dist")]
        found.extend(Path(folder, file) for file in sorted(files) if file != ".git")  # a worktree's
    return [path for path in found if path.suffix not in (".o", ".so")]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process, without settings of this machine; gives exit code, output and errors."""
    for name in list(os.environ):
        if name.startswith("STALLSCOPE_"):
            monkeypatch.delenv(name)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stallscope", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return call
