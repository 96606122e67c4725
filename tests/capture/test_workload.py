"""Container, pod and job of a process, in a /proc that the test makes: control groups as the runtimes make them."""

import os
from pathlib import Path

import pytest

from stallscope.capture.process.workload import workload

ID = "0a1b2c3d4e5f" + "0" * 52
UID = "8f6d1c9e-1234-4abc-8def-0123456789ab"
CGROUPS = {
    "docker v1": f"12:cpu,cpuacct:/docker/{ID}\n1:name=systemd:/docker/{ID}",
    "docker v2": f"0::/system.slice/docker-{ID}.scope",
    "podman": f"0::/machine.slice/libpod-{ID}.scope/container",
    "kubelet v1": f"4:memory:/kubepods/burstable/pod{UID}/{ID}",
    "kubelet v2": f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
    f"/cri-containerd-{ID}.scope",
    "cri-o": f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/crio-{ID}.scope",
    "nested": "0::/system.slice/containerd.service/kubepods-besteffort"
    f"-pod{UID.replace('-', '_')}.slice:cri-containerd:{ID}",
}


def process(proc: Path, groups: str) -> Path:
    (proc / "7" / "root").mkdir(parents=True, exist_ok=True)
    (proc / "7" / "cgroup").write_text(groups + "\n")
    return proc


@pytest.mark.parametrize("runtime", CGROUPS)
def test_the_container_is_identified_for_every_runtime(tmp_path: Path, runtime: str):
    assert workload(7, {}, process(tmp_path, CGROUPS[runtime]))["container"] == ID[:12]


@pytest.mark.parametrize("runtime", ["kubelet v1", "kubelet v2", "cri-o", "nested"])
def test_a_pod_is_identified_by_uid_name_and_namespace(tmp_path: Path, runtime: str):
    variables = {"HOSTNAME": "trainer-0", "POD_NAMESPACE": "research"}
    result = workload(7, variables, process(tmp_path, CGROUPS[runtime]))
    assert (result["pod_uid"], result["pod"], result["namespace"]) == (UID, "trainer-0", "research")


def test_a_host_name_outside_kubernetes_is_not_a_pod(tmp_path: Path):
    result = workload(7, {"HOSTNAME": "me", "NAMESPACE": "x"}, process(tmp_path, CGROUPS["docker v2"]))
    assert result == {"container": ID[:12]}


def test_the_namespace_is_read_in_the_containers_own_root(tmp_path: Path):
    proc = process(tmp_path, CGROUPS["cri-o"])
    folder = proc / "7" / "root" / "run/secrets/kubernetes.io/serviceaccount"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..2026/namespace").write_text("research\n")
    (folder / "..data").symlink_to("..2026")
    (folder / "namespace").symlink_to("..data/namespace")
    assert workload(7, {}, proc)["namespace"] == "research"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_tenant_cannot_make_the_agent_read_or_wait_elsewhere(tmp_path: Path, kind: str):
    proc = process(tmp_path, CGROUPS["cri-o"])
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = proc / "7" / "root" / "run/secrets/kubernetes.io/serviceaccount"
    folder.mkdir(parents=True)
    if kind == "link":
        (folder / "namespace").symlink_to(secret)
    else:
        os.mkfifo(folder / "namespace")
    assert "namespace" not in workload(7, {}, proc)


@pytest.mark.parametrize(
    ("groups", "variables", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", {}, "123"),
        ("5:memory:/slurm/uid_1000/job_123/step_batch", {}, "123"),
        ("0::/", {"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "none"}, "77"),
        ("0::/", {"TORCHELASTIC_RUN_ID": "night-run"}, "night-run"),
        ("0::/", {"TORCHELASTIC_RUN_ID": "none"}, None),
        ("0::/", {"AWS_BATCH_JOB_ID": "a\x1b[2Jb"}, "a[2Jb"),
    ],
)
def test_the_job_is_identified_by_the_scheduler(
    tmp_path: Path, groups: str, variables: dict[str, str], job: str | None
):
    assert workload(7, variables, process(tmp_path, groups)).get("job") == job


def test_an_ecs_task_is_identified(tmp_path: Path):
    task = "0123456789abcdef0123456789abcdef"
    assert workload(7, {}, process(tmp_path, f"0::/ecs/mycluster/{task}/{ID}"))["task"] == task
    assert workload(7, {}, process(tmp_path, f"1:cpu:/ecs/{task}/{task}-4711"))["task"] == task


def test_an_ended_process_has_no_workload(tmp_path: Path):
    assert workload(8, {}, tmp_path) == {}


def test_owner_of_a_slurm_step(tmp_path: Path):
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_USER": "ann",
        "SLURM_JOB_ACCOUNT": "ml",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_QOS": "high",
        "SLURM_STEP_ID": "0",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    groups = "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"
    assert workload(7, variables, process(tmp_path, groups)) == {
        "job": "4711",
        "job_name": "train",
        "user": "ann",
        "account": "ml",
        "partition": "gpu",
        "qos": "high",
        "job_step": "0",
        "array_task": "3",
    }


@pytest.mark.parametrize(
    ("variables", "labels"),
    [
        (
            {"LSB_JOBID": "5511", "LSB_JOBNAME": "train", "LSB_QUEUE": "gpu", "LSB_JOBINDEX": "4"},
            {"job": "5511", "job_name": "train", "queue": "gpu", "array_task": "4"},
        ),
        ({"LSB_JOBID": "5512", "LSB_JOBINDEX": "0"}, {"job": "5512"}),
        (
            {"PBS_JOBID": "88[3].head", "PBS_JOBNAME": "train", "PBS_QUEUE": "day", "PBS_ARRAY_INDEX": "3"},
            {"job": "88[3].head", "job_name": "train", "queue": "day", "array_task": "3"},
        ),
        ({"PBS_JOBID": "89.head", "PBS_ARRAYID": "2"}, {"job": "89.head", "array_task": "2"}),
        ({"PMIX_NAMESPACE": "prterun-n1-88@1", "PMIX_RANK": "0"}, {"job": "prterun-n1-88@1"}),
        ({"OMPI_MCA_ess_base_jobid": "123456"}, {"job": "123456"}),
        ({"OMPI_MCA_orte_ess_jobid": "654321"}, {"job": "654321"}),
        ({"LSB_JOBID": "5511", "PMIX_NAMESPACE": "prterun-n1-88@1"}, {"job": "5511"}),
        ({"PBS_JOBID": "90.head", "OMPI_MCA_ess_base_jobid": "123456"}, {"job": "90.head"}),
    ],
)
def test_owner_of_a_job_of_lsf_pbs_and_mpi(tmp_path: Path, variables: dict[str, str], labels: dict[str, str]):
    """Variables as in the references of LSF 10.1, PBS Professional 2022.1, Torque, Open MPI 4 and 5."""
    assert workload(7, variables, process(tmp_path, "0::/")) == labels


@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        ("0::/system.slice/train.service", "train.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", "jupyter.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        ("0::/system.slice/slurmd.service", None),
        (CGROUPS["nested"], None),
    ],
)
def test_systemd_unit_outside_containers(tmp_path: Path, groups: str, unit: str | None):
    assert workload(7, {}, process(tmp_path, groups)).get("unit") == unit


def test_the_user_is_the_process_owner_except_for_root(tmp_path: Path):
    proc = process(tmp_path, "0::/")
    assert "user" not in workload(7, {}, proc)
    os.chown(proc / "7", 65534, 65534)
    assert workload(7, {}, proc)["user"] == "nobody"
