"""Jobs of Slurm, from the text of scontrol 22.05 (recorded here) and from the JSON of several versions."""

import json

import pytest

from stallscope.capture.owners.slurm import Slurm, expanded, of_json, of_text

HELD = (
    "JobId=1 JobName=holder UserId=ann(1001) GroupId=ann(1001) MCS_label=N/A Priority=4294901759 Nice=0 Account=ml "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0 "
    "DerivedExitCode=0:0 RunTime=00:00:04 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-30T01:04:10 "
    "StartTime=2026-11-30T01:04:10 EndTime=Unknown Partition=p AllocNode:Sid=vm:15539 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=vm BatchHost=vm NumNodes=1 NumCPUs=1 TRES=cpu=1,mem=4000M,node=1,billing=1 "
    "JOB_GRES=gpu:4   Nodes=vm CPU_IDs=0 Mem=4000 GRES=gpu:4(IDX:0-3) MinCPUsNode=1 Command=(null) WorkDir=/home/ann"
)
ARRAY = (
    "JobId=9 ArrayJobId=7 ArrayTaskId=3 JobName=two words UserId=bob(1002) GroupId=b(5) MCS_label=N/A Priority=1 "
    "Nice=0 Account=vision QOS=high WCKey=* JobState=RUNNING Reason=None StartTime=2026-11-30T01:00:00 Partition=night "
    "NodeList=n[01-03] NumNodes=3 JOB_GRES=gpu:h100:6 Nodes=n[01-02] CPU_IDs=0-3 Mem=1 GRES=gpu:h100:2(IDX:0,3) "
    "  Nodes=n03 CPU_IDs=0 Mem=1 GRES=gpu:h100:2(IDX:6-7) Command=/x NodeList=evil"
)


def test_a_running_job_has_its_labels_and_gpus():
    (job,) = of_text(HELD, "vm")
    assert job.labels == {
        "job": "1",
        "job_name": "holder",
        "user": "ann",
        "account": "ml",
        "partition": "p",
        "node_list": "vm",
    }
    assert job.gpus == ("0", "1", "2", "3")
    assert job.since_ns > 0


@pytest.mark.parametrize(("node", "gpus"), [("n02", ("0", "3")), ("n03", ("6", "7"))])
def test_gpus_are_those_of_this_machine(node, gpus):
    (job,) = of_text(f"{HELD}\n{ARRAY}", node)
    assert job.gpus == gpus
    assert (job.labels["job_name"], job.labels["array_task"], job.labels["qos"]) == ("two words", "3", "high")
    assert job.labels["node_list"] == "n[01-03]"


@pytest.mark.parametrize(
    "line", ["", "No jobs in the system", HELD.replace("RUNNING", "PENDING"), HELD[:80], "JobId=x"]
)
def test_other_lines_give_no_job(line):
    assert list(of_text(line, "vm")) == []


PLAIN = {
    "job_id": 4711,
    "name": "train",
    "user_name": "ann",
    "account": "ml",
    "partition": "p",
    "qos": "normal",
    "array_task_id": None,
    "job_state": "RUNNING",
    "nodes": "n[1-2]",
    "start_time": 1_796_000_000,
    "gres_detail": ["gpu:2(IDX:0-1)", "gpu:2(IDX:4,6)"],
}
WITH_OBJECTS = PLAIN | {
    "job_state": ["RUNNING"],
    "start_time": {"set": True, "infinite": False, "number": 1_796_000_000},
    "array_task_id": {"set": False, "infinite": False, "number": 0},
}


@pytest.mark.parametrize("form", [PLAIN, WITH_OBJECTS], ids=["21.08 to 22.05", "23.02 and later"])
def test_json_of_each_version_gives_the_same_job(form):
    (job,) = of_json(json.dumps({"jobs": [form, form | {"nodes": "n9"}]}), "n2")
    assert job.gpus == ("4", "6")
    assert (job.labels["job"], job.labels["user"], job.since_ns) == ("4711", "ann", 1_796_000_000 * 10**9)
    assert "array_task" not in job.labels


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("vm", ["vm"]),
        ("n[01-03,7],gpu", ["n01", "n02", "n03", "n7", "gpu"]),
        ("a[1-2]b", ["a1b", "a2b"]),
        ("", []),
    ],
)
def test_host_lists_are_expanded(nodes, names):
    assert expanded(nodes) == names


def test_labels_and_allocations_are_of_the_last_answer(tmp_path, monkeypatch):
    """A stand-in for scontrol without JSON, as Debian builds it."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncase "$*" in *json*) exit 1;; esac\necho "{HELD}"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    source = Slurm("vm")
    source.refresh()
    assert source.labels({"job": "1"}, {})["gpus"] == "0,1,2,3"
    assert source.labels({"job": "2"}, {}) == {}
    (allocation,) = source.allocations()
    assert (allocation.key, allocation.gpus) == (("job", "1"), ("0", "1", "2", "3"))


def test_a_missing_scontrol_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="scontrol is not installed"):
        Slurm("vm").refresh()
