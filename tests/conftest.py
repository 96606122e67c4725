"""Fixtures for all tests, and the markers that skip or rerun a test.

The markers `bpf`, `compiler`, `gpu`, `kernels` and `shared` name a requirement. Where the requirement is missing, the
test is skipped with the reason, and the summary counts the reasons. The marker `live` permits two reruns of a test that
waits for events of another process; the summary lists each rerun. The marker `pure` excludes a test of a live module
that waits for nothing.
"""

import ctypes
import inspect
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import hypothesis
import pytest
from tests import shared_servers

from stallscope.cli import main

_PATIENT_S = 60.0

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "google-chrome")
HUB_FOLDERS = ("alerts", "exporters", "hostile", "hub", "page", "receive", "serve", "store")
"""Folders with the tests of `--part hub`, which take about as long as the other tests that do not trace."""


def pytest_configure(config: pytest.Config) -> None:
    """No test fails because the machine is busy, or by an example that only this run has drawn.

    Hypothesis draws the same examples in each run, except with `--prove`, and does not measure their time. Clients wait
    for an answer for a minute, unless a test sets another limit.
    """
    hypothesis.settings.register_profile(
        "stallscope",
        deadline=None,
        derandomize=not config.getoption("--prove"),
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    hypothesis.settings.load_profile("stallscope")
    default = inspect.signature(httpx.Client).parameters["timeout"].default  # all functions of httpx share it
    default.connect = default.read = default.write = default.pool = _PATIENT_S


def data_folder() -> Path:
    """The folder with recordings and public data: $STALLSCOPE_DATA, or `shared` next to the repository."""
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
    return f"no {absent[0]} to build the libraries that tests examine" if absent else None


def _missing_for_kernels() -> str | None:
    if platform.machine() != "x86_64":
        return "virtual machines run only on x86-64"
    absent = [tool for tool in ("qemu-system-x86_64", "busybox", "cpio") if not shutil.which(tool)]
    return f"no {absent[0]} to start virtual machines" if absent else None


def _missing_for_browser() -> str | None:
    if not any(map(shutil.which, BROWSERS)):
        return "no chromium: setup/need.sh browser installs it"
    if not (ROOT / "src" / "stallscope" / "page" / "built" / "index.html").is_file():
        return "the page is not built: make page builds it with npm"
    return None


_MISSING_FOR = {
    "browser": _missing_for_browser,
    "shared": _missing_for_shared,
    "bpf": _missing_for_bpf,
    "gpu": _missing_for_gpu,
    "compiler": _missing_for_compiler,
    "kernels": _missing_for_kernels,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--prove` selects the tests marked `prove`, which `make prove-NAME` runs; `--part` a part of the others."""
    parser.addoption("--prove", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--part", choices=("tracing", "hub", "others"), help="run a part of the tests (all.sh)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that contain no test of the part: importing them costs more time than their tests."""
    part = config.getoption("--part")
    if part is None or not collection_path.name.startswith("test_") or not collection_path.is_file():
        return None
    if part == "tracing":
        return "mark.bpf" not in collection_path.read_text() or None
    return _is_of_hub(collection_path) != (part == "hub") or None


def _is_of_hub(path: Path) -> bool:
    return path.relative_to(ROOT / "tests").parts[0] in HUB_FOLDERS


def _part(item: pytest.Item) -> str:
    """The part that runs a test: every part collects a file that the command line names."""
    if item.get_closest_marker("bpf"):
        return "tracing"
    return "hub" if _is_of_hub(item.path) else "others"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--prove`, leave out the tests that take minutes; with `--part`, the tests of other parts.

    A test that waits for live events may be rerun twice; every other test fails at its first failure.
    """
    part, left_out = config.getoption("--part"), []
    if not config.getoption("--prove"):
        left_out += [item for item in items if item.get_closest_marker("prove")]
    if part:
        left_out += [item for item in items if _part(item) != part]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.get_closest_marker("live") and not item.get_closest_marker("pure"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test whose need is not met."""
    for marker, missing in _MISSING_FOR.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(f"{marker}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by missing requirement, and list each rerun. Reasons are printed by -ra."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] if isinstance(report.longrepr, tuple) else "" for report in reports]
    markers = [reason.removeprefix("Skipped: ").split(":", 1)[0] for reason in reasons]
    counts = Counter(marker if marker in _MISSING_FOR else "other" for marker in markers)
    skipped = ", ".join(f"{marker} {count}" for marker, count in sorted(counts.items()))
    terminalreporter.write_line(f"skipped: {skipped or 'none'}")
    reruns = Counter(report.nodeid for report in terminalreporter.stats.get("rerun", []))
    for nodeid, count in sorted(reruns.items()):
        terminalreporter.write_line(f"rerun {count} of 2: {nodeid}")
    terminalreporter.write_line(f"reruns: {reruns.total()} in {len(reruns)} tests")


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
    paths: list[Path] = []
    for folder, below, files in os.walk(ROOT):
        below[:] = sorted(b for b in below if b == ".ci" or not b.startswith("."))
        below[:] = [b for b in below if b not in ("__pycache__", "build", "built", "dist", "node_modules")]
        paths.extend(Path(folder, file) for file in sorted(files) if file != ".git")  # a worktree's
    return [path for path in paths if path.suffix not in (".o", ".so")]


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
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call


@dataclass
class FakeGpus:
    """A management library whose GPUs the test sets. folder: for LD_LIBRARY_PATH; state: for FAKE_NVML."""

    folder: Path
    state: Path

    def have(self, *gpus: Mapping[str, object], **extra: str) -> None:
        """The values that each GPU reports from now on; a list is reported value by value. extra: whole lines."""
        lines = list(extra.values())
        for number, values in enumerate(gpus):
            which = str(values.get("which", number))
            for key, value in values.items():
                each = value if isinstance(value, list) else [value]
                lines += [f"{which} {key} {entry}" for entry in each if key != "which"]
        new = self.state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.state)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that uses these GPUs."""
        return {"LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML": str(self.state)}


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library."""
    if reason := _missing_for_compiler():
        pytest.skip(f"compiler: {reason}")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).parent / "fakes" / "nvml.c"
    subprocess.run(["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


@pytest.fixture
def fake_gpus(fake_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """GPUs for this process: the real bindings load this library instead of the driver's library."""
    pynvml = pytest.importorskip("pynvml")
    fake = FakeGpus(fake_nvml, tmp_path / "gpus")
    fake.have()
    monkeypatch.setenv("FAKE_NVML", str(fake.state))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(fake_nvml / "libnvidia-ml.so.1")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return fake


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[shared_servers.PostgresServer]:
    """A PostgreSQL server for all tests."""
    if reason := shared_servers.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=shared_servers.fast_folder()) as folder:
        Path(folder).chmod(0o755)
        with shared_servers.postgres_server(Path(folder) / "postgres") as server:
            yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shared_servers.S3Server]:
    """An S3 server for all tests, with its keys in the environment."""
    if reason := shared_servers.missing():
        pytest.skip(reason)
    with (
        shared_servers.s3_server(tmp_path_factory.mktemp("s3")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in shared_servers.environment().items():
            patch.setenv(name, value)
        yield server
