"""The owner of a process: the labels of the table `owners`, from the scheduler, control groups and the environment."""

from collections.abc import Mapping

OWNER_LABELS: Mapping[str, str] = {
    "job": "number of the job: Slurm, LSF, PBS, AWS Batch, Ray, or the run id of torchrun",
    "job_name": "its name in Slurm, LSF, PBS or Ray",
    "array_task": "index in a job array of Slurm, LSF or PBS",
    "job_step": "step of the job in Slurm",
    "user": "the user that runs the process; root is left out",
    "account": "account that Slurm charges",
    "partition": "partition of Slurm",
    "qos": "quality of service in Slurm",
    "node_list": "machines of the job in Slurm",
    "gpus": "GPUs that the scheduler gave to the job on this machine",
    "namespace": "namespace of Kubernetes",
    "pod": "pod of Kubernetes",
    "pod_uid": "its unique id",
    "workload_kind": "kind of the topmost owner of the pod: Job, JobSet, PyTorchJob, RayCluster, ...",
    "workload": "name of that owner; the task family in ECS",
    "queue": "queue: Kueue, LSF or PBS",
    "model": "served model of an inference service",
    "task": "task of ECS",
    "run": "run id of torchrun",
    "actor": "actor of Ray",
    "unit": "systemd unit of a process outside containers",
    "container": "the first twelve digits of the container's id",
    "tags": "chosen labels and annotations of the pod: name=value, separated by commas",
}
"""Label -> meaning, in the order in which a verdict lists them."""

GROUP_LABELS = (
    *("job", "job_name", "user", "account", "partition", "namespace"),
    *("pod", "workload", "queue", "model", "unit"),
)
"""The labels that rows of jobs and verdicts have as columns: filters and sums use them."""

SUM_LABELS = ("user", "account", "partition", "namespace", "queue", "model", "workload")
"""The labels by which costs and GPU time are summed."""

JOB_LABELS = ("job", "job_name")
"""The labels by which a filter `job` knows a job."""

PARTY_LABELS = ("user", "account", "workload", "unit")
"""The labels by which a filter `owner` knows an owner: a person, a group, or a program that starts processes."""


OTEL_ATTRIBUTES: Mapping[str, str] = {
    "user": "process.owner",
    "namespace": "k8s.namespace.name",
    "pod": "k8s.pod.name",
    "pod_uid": "k8s.pod.uid",
    "container": "container.id",
}
"""Label -> attribute of OpenTelemetry's semantic conventions 1.37 (process, k8s, container)."""

_OTEL_WORKLOADS = ("Job", "CronJob", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet")
"""Kinds with an attribute k8s.KIND.name of their own."""


def otel_attribute(label: str) -> str:
    """The attribute of a label."""
    return OTEL_ATTRIBUTES.get(label, f"stallscope.owner.{label}")


def otel_attributes(owner: Mapping[str, str]) -> dict[str, str]:
    """The attributes of an owner."""
    attributes = {otel_attribute(label): owner[label] for label in OWNER_LABELS if owner.get(label)}
    if (kind := owner.get("workload_kind", "")) in _OTEL_WORKLOADS and owner.get("workload"):
        attributes[f"k8s.{kind.lower()}.name"] = owner["workload"]
    return attributes


def column(label: str) -> str:
    """The column of a label."""
    return f"owner_{label}"
