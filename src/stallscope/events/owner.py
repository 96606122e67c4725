"""The owner of a process: labels of the table `annotations`, from control groups and the environment of the process."""

from collections.abc import Mapping

OWNER_LABELS: Mapping[str, str] = {
    "job": "number of the job: Slurm, LSF, PBS, AWS Batch, Ray, or the run id of torchrun",
    "job_name": "its name in Slurm",
    "array_task": "index in a job array of Slurm",
    "job_step": "step of the job in Slurm",
    "user": "the user that runs the process; root is left out",
    "account": "account that Slurm charges",
    "partition": "partition of Slurm",
    "qos": "quality of service in Slurm",
    "namespace": "namespace of Kubernetes",
    "pod": "pod of Kubernetes",
    "pod_uid": "its unique id",
    "task": "task of ECS",
    "run": "run id of torchrun",
    "unit": "systemd unit of a process outside containers",
    "container": "the first twelve digits of the container's id",
}
"""Label -> meaning, in the order in which a verdict lists them."""
