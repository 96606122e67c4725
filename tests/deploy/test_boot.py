"""The units of the package, booted by systemd in a virtual machine: a Debian that setup/boot_root.sh has made.

The machine has one emulated CPU: with two, Linux 6.12 crashes in the emulation while it patches its own code.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.probes.privileges import ALWAYS_NEEDED

from ..kernels import machine

BOOT_S = 2400
_CPU = "Haswell-noTSX"
"""The hub's DuckDB needs AVX2."""
_PREFIX = "/opt/stallscope-hub"
_TRIAL = """[Unit]
After=multi-user.target
[Service]
ExecStart=/usr/lib/stallscope/bin/python3.{minor} /boot.py {part}
Environment=HOME=/root XDG_CACHE_HOME=/var/cache
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=graphical.target
"""

pytestmark = [pytest.mark.kernels, pytest.mark.prove, pytest.mark.timeout(BOOT_S + 1200)]


@pytest.fixture(scope="module")
def system(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a Debian with systemd and the package."""
    packages = sorted((repository / "dist").glob("*.deb"))
    if not packages:
        pytest.skip("kernels: no package (make dist)")
    root = tmp_path_factory.mktemp("boot") / "root"
    run("sh", repository / "setup/boot_root.sh", root, packages[0])
    (root / "boot.py").write_bytes((Path(__file__).parent / "boot.py").read_bytes())
    (root / "init").symlink_to("lib/systemd/systemd")
    run("systemctl", f"--root={root}", "mask", "serial-getty@ttyS0.service")  # waits 90 s for udev
    return root


@pytest.fixture(scope="module")
def agent(system: Path, repository: Path) -> Mapping[str, Any]:
    """The measurements of the agent's unit."""
    return measured(system, repository, "agent")


@pytest.fixture(scope="module")
def hub(system: Path, repository: Path) -> Mapping[str, Any]:
    """The measurements of the hub's unit, with the hub at the path that its unit names."""
    (wheel,) = (repository / "dist").glob("*.whl")
    run(sys.executable, repository / "setup/own_python.py", system / _PREFIX[1:], wheel, "hub", _PREFIX)
    (system / "usr/local/bin/stallscope").symlink_to(f"{_PREFIX}/bin/stallscope")
    unit = "stallscope-hub.service"
    (system / "etc/systemd/system" / unit).write_bytes((repository / "deploy/systemd" / unit).read_bytes())
    return measured(system, repository, "hub")


def measured(root: Path, repository: Path, part: str) -> Mapping[str, Any]:
    """Boot the root and run one part of boot.py there."""
    kernels = sorted((repository / "build/kernels").glob("6.12*/boot/vmlinuz-*"))
    if not kernels:
        pytest.skip("kernels: no 6.12 kernel (setup/kernels.sh)")
    trial = _TRIAL.format(minor=sys.version_info.minor, part=part)
    (root / "etc/systemd/system/trial.service").write_text(trial)
    run("systemctl", f"--root={root}", "enable", "trial.service")
    initramfs = machine.packed(root, root.with_name("initramfs"))
    output = machine.output(kernels[-1], initramfs, timeout_s=BOOT_S, memory_mb=4096, cpu=_CPU)
    initramfs.unlink()
    print(output[-6000:])
    line = re.search(r"^RESULT (\{.*\})\s*$", output, re.MULTILINE)
    assert line, output[-3000:]
    result: Mapping[str, Any] = json.loads(line[1])
    assert "error" not in result, result
    record(repository, part, result, kernels[-1].name)
    return result


def record(repository: Path, part: str, result: Mapping[str, Any], kernel: str) -> None:
    """Keep the measurements of one part in bench/results, with the commit of the packages."""
    path = repository / "bench/results/units.json"
    parts = json.loads(path.read_text()) if path.exists() else {}
    commit = (repository / "dist/COMMIT").read_text().strip()
    path.write_text(
        json.dumps(parts | {part: {"commit": commit, "kernel": kernel} | dict(result)}, indent=4) + "\n"
    )


def run(*words: str | Path) -> None:
    """Run a command; its output is the message of a failure."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]


def test_the_agent_runs_as_its_user_with_exactly_the_five_capabilities(agent: Mapping[str, Any]):
    unit = agent["unit"]
    five = sum(1 << each.value for each in ALWAYS_NEEDED)
    assert (unit["state"], unit["user"]) == ("active", "stallscope-agent")
    assert int(unit["CapEff"], 16) == int(unit["CapBnd"], 16) == five
    assert (unit["NoNewPrivs"], unit["Seccomp"]) == ("1", "2")
    assert exposure(unit) <= 3.0


def test_the_agent_restarts_after_a_kill_and_ends_without_a_failure(agent: Mapping[str, Any]):
    assert agent["result"] == "success"


def test_the_hub_answers_as_its_user_without_capabilities(hub: Mapping[str, Any]):
    unit = hub["unit"]
    assert (unit["state"], unit["user"], int(unit["CapEff"], 16)) == ("active", "stallscope", 0)
    assert (unit["NoNewPrivs"], unit["Seccomp"]) == ("1", "2")
    assert exposure(unit) <= 3.0
    assert hub["ask"][0] == 0, hub["ask"]
    assert hub["result"] == "success"


def exposure(unit: Mapping[str, Any]) -> float:
    """The exposure level that systemd computes, of 10."""
    match = re.search(r"(\d+\.\d+) ", unit["exposure"])
    assert match, unit["exposure"]
    return float(match[1])
