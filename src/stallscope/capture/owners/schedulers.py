"""The sources that the settings choose."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stallscope.capture.owners.idle_rows import IdleGpus
from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.privacy import Privacy
from stallscope.capture.owners.proc_activity import ProcActivity
from stallscope.capture.owners.source import Source
from stallscope.errors import BadInput

KINDS = ("slurm", "kubernetes", "kubelet", "ecs", "ray")


@dataclass(frozen=True, kw_only=True)
class OwnerOptions:
    """kinds: of KINDS, separated by commas. node: this machine's name in the scheduler. tags: labels and annotations
    of pods to keep, separated by commas. addresses: empty, the default. idle_after_ns: 0, idle GPUs are not reported.
    """

    kinds: str = ""
    node: str = ""
    slurm_address: str = ""
    kubernetes_address: str = ""
    ray_address: str = ""
    tags: str = ""
    privacy: Privacy = field(default_factory=Privacy)
    idle_after_ns: int = 0


def owner_sources(options: OwnerOptions, environ: Mapping[str, str] = os.environ) -> list[Source]:
    """The chosen sources. Raises BadInput for an unknown kind, and for Kubernetes outside a cluster."""
    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BadInput(
            f"owners: {unknown[0]!r} is not known; choose from {', '.join(KINDS)}, or leave it empty"
        )
    return [source for kind in kinds for source in _sources(kind, options, environ)]


def _sources(kind: str, options: OwnerOptions, environ: Mapping[str, str]) -> list[Source]:
    """Imports here, because HTTP and TLS cost megabytes that most agents do not need."""
    if kind == "slurm":
        from stallscope.capture.owners.slurm import Slurm

        return [Slurm(environ.get("SLURMD_NODENAME") or options.node, address=options.slurm_address)]
    if kind == "ecs":
        from stallscope.capture.owners.ecs import Ecs

        return [Ecs()]
    if kind == "ray":
        from stallscope.capture.owners.ray import Ray

        return [Ray(options.ray_address)]
    from stallscope.capture.owners.kube_api import KubeApi
    from stallscope.capture.owners.kubernetes import Kubernetes

    tags = tuple(tag.strip() for tag in options.tags.split(",") if tag.strip())
    node = environ.get("NODE_NAME") or options.node
    is_kubelet = kind == "kubelet"
    address = options.kubernetes_address or _address(environ, is_kubelet=is_kubelet)
    if not address:
        raise BadInput("owners: kubernetes outside a pod needs kubernetes_address: https://HOST:PORT")
    # A kubelet signs its certificate itself, as a rule, and listens on the machine of the agent.
    api = KubeApi(address, verifies=not is_kubelet)
    pods = Kubernetes(api, node, is_kubelet=is_kubelet, chosen=tags)
    return [pods.gpus, pods]


def _address(environ: Mapping[str, str], *, is_kubelet: bool) -> str:
    """The address of a kubelet, or of the API; empty outside a cluster."""
    if is_kubelet:
        return f"https://{environ.get('HOST_IP') or '127.0.0.1'}:10250"
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def opened_owners(options: OwnerOptions, note: Callable[[str], None]) -> Owners:
    """The owners, with the threads of the chosen sources. Raises BadInput."""
    owners = Owners(owner_sources(options), options.privacy, note)
    owners.start()
    return owners


def idle_gpus(options: OwnerOptions, owners: Owners, node: int) -> IdleGpus | None:
    """The idle GPUs of the machine; None where they are not wanted."""
    if not options.idle_after_ns:
        return None
    activity = ProcActivity()
    return IdleGpus(
        node,
        options.idle_after_ns,
        activity.used,
        activity.with_label,
        wall_offset_ns=lambda: time.time_ns() - time.monotonic_ns(),
        private=owners.private,
    )
