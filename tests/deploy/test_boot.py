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

from stallscope.capture.probes.privileges import KEPT

from ..kernels import machine

BOOT_S = 2400
_CPU = "Haswell-noTSX"
"""The hub's DuckDB needs AVX2."""
_PREFIX = "/opt/stallscope-hub"
_TRIAL = """[Unit]
After=multi-user.target
[Service]
ExecStart=/usr/lib/stallscope/bin/python3.{minor} /boot.py
Environment=HOME=/root XDG_CACHE_HOME=/var/cache
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=graphical.target
"""

pytestmark = [pytest.mark.kernels, pytest.mark.prove, pytest.mark.timeout(BOOT_S + 1200)]


@pytest.fixture(scope="module")
def measured(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The measurements of tests/deploy/boot.py in the machine."""
    kernels = sorted((repository / "build/kernels").glob("6.12*/boot/vmlinuz-*"))
    packages, wheels = (
        sorted((repository / "dist").glob("*.deb")),
        sorted((repository / "dist").glob("*.whl")),
    )
    if not kernels or not packages or not wheels:
        pytest.skip("kernels: no 6.12 kernel (setup/kernels.sh) or no package (make dist)")
    scratch = tmp_path_factory.mktemp("boot")
    root = scratch / "root"
    run("sh", repository / "setup/boot_root.sh", root, packages[0])
    hub = [repository / "setup/own_python.py", root / _PREFIX[1:], wheels[0], "hub", _PREFIX]
    run(sys.executable, *hub)
    (root / "usr/local/bin/stallscope").symlink_to(f"{_PREFIX}/bin/stallscope")
    (root / "boot.py").write_bytes((Path(__file__).parent / "boot.py").read_bytes())
    units = root / "etc/systemd/system"
    (units / "trial.service").write_text(_TRIAL.format(minor=sys.version_info.minor))
    (units / "stallscope-hub.service").write_bytes(
        (repository / "deploy/systemd/stallscope-hub.service").read_bytes()
    )
    run("systemctl", f"--root={root}", "enable", "trial.service")
    run("systemctl", f"--root={root}", "mask", "serial-getty@ttyS0.service")  # waits 90 s for udev
    (root / "init").symlink_to("lib/systemd/systemd")
    initramfs = machine.packed(root, scratch / "initramfs")
    output = machine.output(kernels[-1], initramfs, timeout_s=BOOT_S, memory_mb=4096, cpu=_CPU)
    initramfs.unlink()
    line = re.search(r"^RESULT (\{.*\})\s*$", output, re.MULTILINE)
    assert line, output[-3000:]
    print(output[-6000:])
    result: Mapping[str, Any] = json.loads(line[1])
    assert "error" not in result, result
    return result


def run(*words: str | Path) -> None:
    """Run a command; its output is the message of a failure."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]


def test_the_agent_runs_as_its_user_with_exactly_the_five_capabilities(measured: Mapping[str, Any]):
    agent = measured["agent"]
    five = sum(1 << each.value for each in KEPT)
    assert (agent["state"], agent["user"]) == ("active", "stallscope-agent")
    assert int(agent["CapEff"], 16) == int(agent["CapBnd"], 16) == five
    assert (agent["NoNewPrivs"], agent["Seccomp"]) == ("1", "2")


def test_the_hub_runs_as_its_user_without_capabilities(measured: Mapping[str, Any]):
    hub = measured["hub"]
    assert (hub["state"], hub["user"], int(hub["CapEff"], 16)) == ("active", "stallscope", 0)
    assert (hub["NoNewPrivs"], hub["Seccomp"]) == ("1", "2")


def test_the_running_units_are_exposed_little(measured: Mapping[str, Any]):
    for unit in ("agent", "hub"):
        match = re.search(r"(\d+\.\d+) ", measured[unit]["exposure"])
        assert match and float(match[1]) <= 3.0, measured[unit]["exposure"]


def test_the_trace_and_the_hub_name_the_slow_rank(measured: Mapping[str, Any]):
    code, text, errors = measured["explain"]
    assert code == 20 and "Rank 2" in text, (text, errors)
    assert any(verdict["ranks"] == [2] for verdict in measured["verdicts"])


def test_the_services_end_without_a_failure(measured: Mapping[str, Any]):
    assert measured["stallscope-agent result"] == measured["stallscope-hub result"] == "success"
