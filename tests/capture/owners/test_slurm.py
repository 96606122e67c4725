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


THROTTLED = ARRAY.replace("ArrayTaskId=3 ", "ArrayTaskId=3 ArrayTaskThrottle=2 ")


def component(number: int, offset: int, node: str) -> str:
    """A component of a heterogeneous job; the number of the whole job is 93."""
    return (
        HELD.replace(
            "JobId=1 JobName=holder", f"JobId={number} HetJobId=93 HetJobOffset={offset} JobName=het x"
        )
        .replace(" UserId=", " HetJobIdSet=93-94 UserId=")
        .replace("NodeList=vm", f"NodeList={node}")
        .replace("Nodes=vm", f"Nodes={node}")
        .replace("gpu:4(IDX:0-3)", f"gpu:1(IDX:{offset})")
    )


def test_a_job_array_with_a_limit_of_running_tasks_is_read():
    (job,) = of_text(THROTTLED, "n03")
    assert (job.labels["job"], job.labels["array_task"], job.gpus) == ("9", "3", ("6", "7"))


def scheduler(monkeypatch, text: str, node: str = "vm") -> Slurm:
    monkeypatch.setattr("stallscope.capture.owners.slurm._run", lambda *command: text)
    source = Slurm(node)
    source.refresh()
    return source


def test_components_of_a_heterogeneous_job_have_its_number_and_hold_their_gpus_together(monkeypatch):
    source = scheduler(monkeypatch, f"{component(93, 0, 'vm')}\n{component(94, 1, 'vm')}")
    (allocation,) = source.allocations()
    assert (allocation.key, allocation.gpus) == (("job", "93"), ("0", "1"))
    for number in ("93", "94"):  # of the environment; of a control group
        assert source.labels({"job": number}, {})["job_name"] == "het x"
        assert source.labels({"job": number}, {})["job"] == "93"


def test_a_machine_with_one_component_knows_the_number_of_the_whole_job(monkeypatch):
    source = scheduler(monkeypatch, f"{component(93, 0, 'other')}\n{component(94, 1, 'vm')}")
    assert source.labels({"job": "93"}, {})["gpus"] == "1"
    assert source.allocations()[0].key == ("job", "93")


def test_a_machine_with_a_long_name_is_known_to_slurm_by_its_short_name():
    (job,) = of_text(HELD, "vm.cluster.example")
    assert job.gpus == ("0", "1", "2", "3")


def number(value: int | None) -> dict[str, object]:
    """A number of slurmrestd from 23.02 on."""
    return {"set": value is not None, "infinite": False, "number": value or 0}


START_S = 1_796_000_000
V21_08 = {
    "job_id": 4711,
    "name": "train",
    "user_id": 1001,
    "user_name": "ann",
    "account": "ml",
    "partition": "p",
    "qos": "normal",
    "array_job_id": 0,
    "array_task_id": None,
    "het_job_id": 0,
    "job_state": "RUNNING",
    "nodes": "n[1-2]",
    "start_time": START_S,
    "gres_detail": ["gpu:2(IDX:0-1)", "gpu:2(IDX:4,6)"],
}
V22_05 = V21_08 | {"array_task_id": 0}
V23_02 = V21_08 | {"array_job_id": number(0), "array_task_id": number(None), "het_job_id": number(0)}
V23_11 = V23_02 | {"job_state": ["RUNNING"], "start_time": number(START_S)}
V24_11 = V23_11 | {"job_id": number(4711), "job_state": ["RUNNING", "POWER_UP_NODE"], "user_id": number(1001)}
VERSIONS = {"21.08": V21_08, "22.05": V22_05, "23.02": V23_02, "23.11": V23_11, "24.11": V24_11}


@pytest.mark.parametrize("version", VERSIONS)
def test_json_of_each_version_gives_the_same_job(version):
    form = VERSIONS[version]
    (job,) = of_json(json.dumps({"jobs": [form, form | {"nodes": "n9"}]}), "n2")
    assert job.gpus == ("4", "6")
    assert (job.labels["job"], job.labels["user"], job.since_ns) == ("4711", "ann", START_S * 10**9)
    assert "array_task" not in job.labels


@pytest.mark.parametrize("version", VERSIONS)
def test_json_of_each_version_has_the_first_array_task_and_the_heterogeneous_job(version):
    form = VERSIONS[version]
    is_object = isinstance(form["het_job_id"], dict)
    numbers = {"array_job_id": 4700, "array_task_id": 0, "het_job_id": 93}
    changed = {name: number(value) if is_object else value for name, value in numbers.items()}
    (job,) = of_json(json.dumps({"jobs": [form | changed]}), "n1")
    assert (job.labels["array_task"], job.labels["job"], job.number) == ("0", "93", "4711")


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"nodes": "n1"}, ("?", "?", "?", "?")),
        ({}, ()),
        ({"nodes": "n1", "tres_alloc_str": "cpu=8,node=1"}, ()),
    ],
    ids=["one machine", "several machines", "no GPU"],
)
def test_without_details_the_number_of_gpus_is_known_on_one_machine_only(changes, gpus):
    plain = V24_11 | {"gres_detail": [], "tres_alloc_str": "cpu=8,node=2,gres/gpu=4,gres/gpu:h100=4"}
    (job,) = of_json(json.dumps({"jobs": [plain | changes]}), "n1")
    assert job.gpus == gpus


def test_a_refusal_of_slurmrestd_is_an_error_in_words():
    refusal = {"errors": [{"error_number": 1007, "error": "Protocol authentication error"}], "jobs": []}
    with pytest.raises(OSError, match="refuses the list of jobs: Protocol authentication error"):
        list(of_json(json.dumps(refusal), "n1"))


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
