"""The owner of a process as its users know it: the labels of events/owner.py.

From its control groups (v1 and v2) and the environment it was started with. Unknown values are left out. Paths: Docker,
containerd, CRI-O, Podman, the kubelet's cgroupfs and systemd drivers, Slurm, ECS.
"""

import ctypes
import os
import platform
import pwd
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from stallscope.capture.process.process_identity import small_file

_CONTAINER = re.compile(r"(?:^|[/:.-])([0-9a-f]{12})[0-9a-f]{52}(?:\.scope)?(?:/|$)", re.MULTILINE)
_ECS = re.compile(r"/ecs/(?:[^/\s]+/)*([0-9a-f]{32})[-/]([0-9a-f]{32}-\d+|[0-9a-f]{64})")
_POD = re.compile(
    r"(?:kubepods[^\s]*?[/-]|/\.\./)pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})\b"
)
"""An agent in a control group namespace of its own sees a pod of the same class as /../../podUID."""
_RAY = re.compile(rb"ray::([^\0\s]+)")
"""Ray names its workers after the task or method that they run."""
_SLURM_STEP = re.compile(r"/job_\d+/step_([^/\s]+)")
_SLURM = re.compile(r"/(?:slurm|slurmstepd)[^\s]*?/job_(\d+)(?:/|$)", re.MULTILINE)
_UNIT = re.compile(r"^0::.*/([^/\s]+\.service)(?:/|$)", re.MULTILINE)
_NO_UNIT = re.compile(r"^(?:user@\d+|slurmd|slurmstepd|containerd|docker|crio|kubelet)\.service$")
"""Services that run the processes of other owners."""

_FROM_ENVIRONMENT = {
    "job_step": "SLURM_STEP_ID",
    "account": "SLURM_JOB_ACCOUNT",
    "partition": "SLURM_JOB_PARTITION",
    "qos": "SLURM_JOB_QOS",
    "run": "TORCHELASTIC_RUN_ID",
    "node_list": "SLURM_JOB_NODELIST",
}
"""Output variables of srun and sbatch (https://slurm.schedmd.com/srun.html), and of torchrun."""

_ARRAY_TASKS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID")
"""Slurm, PBS Professional, Torque; the index 0 of LSF is a job without an array."""

_FROM_FIRST = {
    "job_name": ("SLURM_JOB_NAME", "LSB_JOBNAME", "PBS_JOBNAME", "TRAINING_JOB_NAME"),
    "queue": ("LSB_QUEUE", "PBS_QUEUE", "AWS_BATCH_JQ_NAME"),
    "gpus": ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"),
}
"""The first variable that is set: Slurm, LSF, PBS, SageMaker, AWS Batch."""

_POD_NAMES = ("POD_NAME", "K8S_POD_NAME", "MY_POD_NAME", "KUBERNETES_POD_NAME")
_NAMESPACES = ("POD_NAMESPACE", "K8S_NAMESPACE", "MY_POD_NAMESPACE", "KUBERNETES_NAMESPACE", "NAMESPACE")
_JOBS = (
    "SLURM_JOB_ID",
    "LSB_JOBID",
    "PBS_JOBID",
    "AWS_BATCH_JOB_ID",
    "TRAINING_JOB_NAME",
    "CLOUD_ML_JOB_ID",
    "RAY_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
)
"""The first variable that is set."""

_UNKNOWN = ("", "none", "ffffffff")
"""The run id of torchrun without a name; the job of a worker that Ray starts in advance."""

_SERVICE_ACCOUNT = "run/secrets/kubernetes.io/serviceaccount/namespace"
_OPENAT2, _RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 437, 0x10, 0x02
_MAX_BYTES = 128


def workload(pid: int, variables: Mapping[str, str], proc: Path = Path("/proc")) -> dict[str, str]:
    """The known labels of the process, see events/owner.py."""
    home = proc / str(pid)
    try:
        groups = (home / "cgroup").read_text()
    except OSError:
        groups = ""
    pod_uid = _first_match(_POD, groups).replace("_", "-")
    is_pod = bool(pod_uid) or "KUBERNETES_SERVICE_HOST" in variables
    labels = {
        "container": container_in(groups),
        "pod_uid": pod_uid,
        "pod": _first(variables, _POD_NAMES) or (variables.get("HOSTNAME", "") if is_pod else ""),
        "namespace": (_first(variables, _NAMESPACES) or _inside(home, _SERVICE_ACCOUNT)) if is_pod else "",
        "task": _first_match(_ECS, groups),
        "job": _first(variables, _JOBS) or _first_match(_SLURM, groups),
        "user": variables.get("SLURM_JOB_USER", "") or _user(home),
        "unit": _unit(groups),
        **{label: _first(variables, (name,)) for label, name in _FROM_ENVIRONMENT.items()},
        **{label: _first(variables, names) for label, names in _FROM_FIRST.items()},
        "array_task": _first(variables, _ARRAY_TASKS) or variables.get("LSB_JOBINDEX", "").removeprefix("0"),
        "actor": _ray_actor(home) if variables.get("RAY_JOB_ID") else "",
    }
    labels["job_step"] = labels["job_step"] or _first_match(_SLURM_STEP, groups)
    return {name: _plain(value) for name, value in labels.items() if _plain(value)}


def _user(home: Path) -> str:
    """The name of the process's user, or its number; empty for root, which owns containers of many users."""
    try:
        uid = home.stat().st_uid
    except OSError:
        return ""
    if not uid:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _ray_actor(home: Path) -> str:
    """The class of the actor in a title such as ray::Trainer.step; the name of a task in any other title."""
    match = _RAY.match(small_file(f"{home}/cmdline"))
    name = match[1].decode("utf-8", "replace") if match else ""
    return "" if name == "IDLE" else name.partition(".")[0]


def _unit(groups: str) -> str:
    """The innermost service of a process outside containers."""
    unit = _first_match(_UNIT, groups)
    return "" if container_in(groups) or _NO_UNIT.match(unit) else unit


def container_in(groups: str) -> str:
    """The first twelve digits of the container id in the text of /proc/PID/cgroup; empty without a container."""
    return _first_match(_CONTAINER, groups)


def _first_match(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    values = (variables.get(name, "") for name in names)
    return next((value for value in values if value not in _UNKNOWN), "")


def _plain(value: str) -> str:
    """A text chosen by a tenant and shown to other users: printable and short."""
    text = "".join(c for c in value.strip() if c.isprintable())
    return text.encode()[:_MAX_BYTES].decode(errors="ignore")


def _inside(home: Path, path: str) -> str:
    """A small file in the process's own root, without following links out of that root; empty without it."""
    try:
        root = os.open(home / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _small_text(root, path)
    finally:
        os.close(root)


def _small_text(root: int, path: str) -> str:
    if platform.machine() not in ("x86_64", "aarch64"):
        return ""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    how = struct.pack("=QQQ", flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    fd = ctypes.CDLL(None).syscall(_OPENAT2, root, path.encode(), how, len(how))
    if fd < 0:
        return ""
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return os.read(fd, 256).decode("utf-8", "replace") if is_file else ""
    except OSError:
        return ""
    finally:
        os.close(fd)
