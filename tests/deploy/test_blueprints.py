"""Blueprints and install pages: their files exist, their commands and options exist, and their scripts work."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from stallscope import cli
from stallscope.capture.probes.privileges import ALWAYS_NEEDED

from ..patience import until

PAGES = ("docs/install.md", "docs/production.md", "README.md", "deploy/helm/stallscope/templates/NOTES.txt")
_OWN_FILES = re.compile(r"(?<![\w/.-])((?:deploy|setup|docs|bench)/[\w./-]+\.\w+)")


def commands(text: str) -> list[list[str]]:
    """The words after `stallscope` in each command of a page."""
    text = text.replace("\\\n", " ")
    matches = re.findall(r"(?:^|\$ |sudo |-- |`)stallscope ((?:[a-z]|--)[^\n`|;&#]*)", text, re.MULTILINE)
    return [words.split() for words in matches]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_has_these_options(repository: Path, page: str):
    root = typer.main.get_command(cli.app)
    for words in commands((repository / page).read_text()):
        command = root
        rest = list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        own = rest[: rest.index("--")] if "--" in rest else rest
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= options | {"--help", "--version"}, (page, words)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(repository: Path, page: str):
    for name in _OWN_FILES.findall((repository / page).read_text()):
        if "://" not in name:
            assert (repository / name).exists(), (page, name)


def test_every_make_target_of_the_pages_exists(repository: Path):
    targets = set(re.findall(r"^([a-z][\w-]*):", (repository / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = (repository / page).read_text()
        assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE)) <= targets, page


def test_the_compose_file_names_files_and_options_that_exist(repository: Path):
    folder = repository / "deploy" / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert set(services) == {"hub", "prometheus", "grafana"}
    made_by_the_user = {"./hub", "./read.token", "./hub.crt"}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in made_by_the_user or "/" not in source or (folder / source).exists(), source
    root = typer.main.get_command(cli.app)
    options = {option for parameter in root.commands["hub"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {word.partition("=")[0] for word in services["hub"]["command"][1:]} <= options


@pytest.mark.parametrize("name", ["compose/prometheus.yaml", "scrape/prometheus-kubernetes.yaml"])
def test_prometheus_accepts_the_scrape_settings(repository: Path, tmp_path: Path, name: str):
    jobs = yaml.safe_load((repository / "deploy" / name).read_text())["scrape_configs"]
    assert all(job["job_name"].startswith("stallscope-") for job in jobs)


def test_the_seccomp_profile_allows_tracing_but_no_machine_changes(repository: Path):
    profile = json.loads((repository / "deploy/seccomp/stallscope-agent.json").read_text())
    (rule,) = profile["syscalls"]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO" and rule["action"] == "SCMP_ACT_ALLOW"
    assert {"bpf", "perf_event_open", "process_vm_readv"} <= set(rule["names"])
    assert not {"mount", "init_module", "kexec_load", "reboot", "ptrace", "swapon", "settimeofday"} & set(
        rule["names"]
    )


def test_the_page_on_containers_has_the_five_capabilities(repository: Path):
    text = (repository / "docs/install.md").read_text()
    named = set(re.findall(r"--cap-add (\w+)", text))
    assert named == {each.name.removeprefix("CAP_") for each in ALWAYS_NEEDED}


def test_the_packages_name_files_that_exist(repository: Path):
    config = yaml.safe_load((repository / "deploy/packages/nfpm.yaml").read_text())
    for entry in config["contents"]:
        source = entry["src"]
        assert source.startswith(("$", "/")) or (repository / source).exists(), source
    assert {entry["dst"] for entry in config["contents"] if entry.get("type") == "config|noreplace"} == {
        "/etc/stallscope/settings.yaml"
    }
    for script in config["scripts"].values():
        done = subprocess.run(["sh", "-n", repository / script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_prolog_starts_a_trace_and_the_epilog_writes_a_report(repository: Path, tmp_path: Path):
    program = tmp_path / "bin" / "stallscope"
    program.parent.mkdir()
    script = (
        tmp_path / "script.py"
    )  # the first line of a program cannot name an interpreter with a space in its path
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit())\n"
        "with open(os.environ['LOG'], 'a') as log:\n"
        "    print(*sys.argv[1:], file=log)\n"
        "if sys.argv[1] == 'trace':\n"
        "    time.sleep(20)\n"
        "print('report')\n"
    )
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "STALLSCOPE_SLURM_FOLDER": str(tmp_path / "slurm"),
        "LOG": str(tmp_path / "log"),
    }
    folder = tmp_path / "slurm" / "42"
    for script in ("prolog.sh", "epilog.sh"):
        subprocess.run(["sh", repository / "deploy/slurm" / script], env=environment, check=True, timeout=60)
        until(lambda: (tmp_path / "log").exists() and "trace" in (tmp_path / "log").read_text())
    assert (folder / "report.txt").read_text() == "report\n"
    assert not (folder / "pid").exists()
    log = (tmp_path / "log").read_text()
    assert f"trace --quiet --db {folder}/trace.db" in log and f"explain --db {folder}/trace.db --json" in log


def test_the_epilog_of_a_job_without_a_trace_changes_no_files(repository: Path, tmp_path: Path):
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "STALLSCOPE_SLURM_FOLDER": str(tmp_path)}
    subprocess.run(["sh", repository / "deploy/slurm/epilog.sh"], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
