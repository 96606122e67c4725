"""`stallscope check`: lines, JSON, exit codes."""

import json
import tarfile

import pytest


def test_lines_have_the_state_subject_and_action(run, tmp_path):
    code, out, _ = run("check", "--db", tmp_path / "trace.db")
    assert code in (0, 5)
    assert any(line.split()[:2] == ["pass", "kernel"] for line in out.splitlines())
    assert all(
        line.startswith(("pass  ", "warn  ", "fail  ", " " * 22 + "action: ")) for line in out.splitlines()
    )


def test_json_states_whether_the_machine_is_ready(run, tmp_path):
    code, out, _ = run("check", "--db", tmp_path / "trace.db", "--json")
    data = json.loads(out)
    assert data["ready"] is (code == 0)
    assert {check["state"] for check in data["checks"]} <= {"pass", "warn", "fail"}
    assert {"kernel", "BTF", "capabilities", "driver", "clock", "storage", "hub"} <= {
        check["subject"] for check in data["checks"]
    }


def test_a_hub_that_does_not_answer_ends_it_with_5(run, tmp_path):
    code, out, _ = run("check", "--db", tmp_path / "trace.db", "--hub", "localhost:1")
    assert code == 5
    assert "fail  hub" in out


def test_a_bundle_is_written_in_addition_to_the_report(run, tmp_path):
    _, _, err = run("check", "--db", tmp_path / "trace.db", "--bundle", tmp_path / "b.tar.gz")
    assert "check.json" in err
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        assert "stallscope/trace.json" in tar.getnames()


@pytest.mark.parametrize("index", ["/proc/none/b.tar.gz"])
def test_a_bundle_that_cannot_be_written_is_reported(run, tmp_path, index):
    code, _, err = run("check", "--db", tmp_path / "trace.db", "--bundle", index)
    assert code == 4
    assert err.startswith(f"stallscope: cannot write {index}")
