"""The systemd units: systemd finds nothing wrong with them, and they start commands that exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stallscope import cli
from stallscope.capture.probes.privileges import ALWAYS_NEEDED

UNITS = {"stallscope-hub.service": 30, "stallscope-agent.service": 30}
"""Each with the exposure that `systemd-analyze security` may find, of 100."""

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deploy" / "systemd"


def command(folder: Path, unit: str) -> list[str]:
    """The command that a unit starts."""
    text = (folder / unit).read_text().replace("\\\n", " ")
    match = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert match
    return match[1].split()


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_no_fault(folder: Path, tmp_path: Path, unit: str):
    program = tmp_path / "stallscope"
    program.symlink_to(sys.executable)  # verify looks whether the program is there
    text = re.sub(r"/usr/(local/)?bin/stallscope\b", str(program), (folder / unit).read_text())
    (tmp_path / unit).write_text(re.sub(r"^(User|Group)=stallscope.*$", r"\1=root", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if unit in line]
    assert not lines, done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_a_service_meets_its_systemd_security_threshold(folder: Path, unit: str):
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={UNITS[unit]}", str(folder / unit)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


@pytest.mark.parametrize("unit", UNITS)
def test_the_flags_it_gives_exist(folder: Path, unit: str):
    program, word, *rest = command(folder, unit)
    assert program.endswith("/stallscope")
    output = CliRunner().invoke(cli.app, [word, "--help"], env={"COLUMNS": "200"}).output
    for flag in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{flag}\b", output), flag


def test_the_agent_runs_unprivileged_with_only_its_kept_capabilities(folder: Path):
    text = (folder / "stallscope-agent.service").read_text()
    user = re.search(r"^User=(.*)$", text, re.MULTILINE)
    assert user and f"\nu      {user[1]} " in (folder / "stallscope-sysusers.conf").read_text()
    for name in ("AmbientCapabilities", "CapabilityBoundingSet"):
        match = re.search(rf"^{name}=(.*)$", text, re.MULTILINE)
        assert match and set(match[1].split()) == {each.name for each in ALWAYS_NEEDED}
