"""The support bundle: its contents, and the data that it must not contain."""

import json
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

from stallscope.check import bundle, readiness
from stallscope.check.finding import warned
from stallscope.settings import effective
from stallscope.store import node

from ..diagnose.builders import dp_trace

HOME = "/" + "home"


def unpacked(path: Path) -> dict[str, dict]:
    with tarfile.open(path) as tar:
        return {member.name: json.load(tar.extractfile(member)) for member in tar.getmembers()}


def written(tmp_path: Path, *, with_names: bool = False) -> Path:
    db = tmp_path / "trace.db"
    if not db.exists():
        node.write(db, dp_trace(n_steps=8))
    chosen = effective({"db": db, "hub": "hub.corp.example:4317"}, {}, None, host_name="secret-box")
    result = [
        warned("libnccl", f"secret-box: {HOME}/alice/venv/libnccl.so", "ask bob@corp.example at 10.1.2.3")
    ]
    out = tmp_path / "bundle.tar.gz"
    bundle.write(out, readiness.as_json(result), chosen, with_names=with_names)
    return out


def test_a_bundle_has_the_data_that_support_needs(tmp_path):
    result = unpacked(written(tmp_path))
    assert result["stallscope/check.json"]["checks"][0]["subject"] == "libnccl"
    assert result["stallscope/machine.json"]["kernel"] == platform.release()
    assert result["stallscope/settings.json"]["hub"]["from"] == "--hub"
    assert result["stallscope/trace.json"]["rows"]["collectives"] == 8 * 4 * 3
    assert result["stallscope/trace.json"]["sessions"][0]["source"] == "made by hand"


def test_names_of_hosts_users_and_addresses_are_left_out(tmp_path):
    text = json.dumps(unpacked(written(tmp_path)))
    for word in ("secret-box", "corp.example", "alice", "bob", "10.1.2.3", "host-a"):
        assert word not in text
    check = unpacked(written(tmp_path))["stallscope/check.json"]["checks"][0]
    assert f"{HOME}/user/venv/libnccl.so" in check["found"]


def test_names_stay_when_asked_for(tmp_path):
    text = json.dumps(unpacked(written(tmp_path, with_names=True)))
    for word in ("secret-box", "hub.corp.example", "alice"):
        assert word in text


def test_a_bundle_has_no_environment_variables_or_command_lines(tmp_path):
    """A second process has a secret in its environment and its arguments; all findings are about the machine."""
    words = [sys.executable, "-c", "input()", "--password=hunter-4711"]
    environment = {**os.environ, "API_KEY": "key-1234567890"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as beside:
        chosen = effective({"db": tmp_path / "none.db"}, {})
        findings = list(readiness.findings(chosen.settings))
        bundle.write(tmp_path / "b.tar.gz", readiness.as_json(findings), chosen)
        beside.communicate(b"\n")
    text = json.dumps(unpacked(tmp_path / "b.tar.gz"))
    assert "kernel" in text
    assert "hunter-4711" not in text
    assert "key-1234567890" not in text


def test_only_its_owner_can_read_it(tmp_path):
    assert written(tmp_path).stat().st_mode & 0o077 == 0


def test_the_same_facts_give_the_same_bytes(tmp_path):
    assert written(tmp_path).read_bytes() == written(tmp_path).read_bytes()


def test_short_host_names_do_not_eat_other_words():
    assert bundle.redacted("vm vmlinux on vm:8 kvm", ["vm"]) == "host-1 vmlinux on host-1:8 kvm"
