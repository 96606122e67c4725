"""GPUs of containers from the kubelet's PodResources socket: of device plugins, and of DRA.

Message and field numbers: staging/src/k8s.io/kubelet/pkg/apis/podresources/v1/api.proto of Kubernetes 1.34.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.owners.source import Allocation, Labels
from stallscope.capture.owners.unary_call import fields, unary_call

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_LIST = "/v1.PodResourcesLister/List"
_GPU = re.compile(r"(?:^|\.)gpu\.|/.*gpu|/mig-")
"""nvidia.com/gpu, nvidia.com/mig-1g.10gb, amd.com/gpu, gpu.intel.com/i915; drivers such as gpu.nvidia.com. Other
devices of these companies are network cards and channels."""

_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Device plugins that share a GPU add a number to its UUID."""


class ContainerGpus(NamedTuple):
    """A container with GPUs. gpus: device ids of the plugin (UUIDs of GPUs or MIG instances), or DRA device names."""

    namespace: str
    pod: str
    container: str
    gpus: tuple[str, ...]


@dataclass
class PodGpus:
    """The GPUs of containers, as a source of its own: pods are known while the kubelet's socket does not answer."""

    socket: Path = SOCKET
    every_s: float = 10.0
    name: str = "the kubelet's GPUs"
    current: list[ContainerGpus] = field(default_factory=list)

    def refresh(self) -> None:
        """See Source."""
        self.current = container_gpus(self.socket)

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """Kubernetes adds the GPUs to the labels of a pod."""
        return {}

    def allocations(self) -> list[Allocation]:
        """See Kubernetes."""
        return []


def container_gpus(socket: Path = SOCKET) -> list[ContainerGpus]:
    """The containers with GPUs. Raises OSError if the kubelet does not answer."""
    answer = unary_call(socket, _LIST, b"")
    return [each for number, pod in fields(answer) if number == 1 for each in _of_pod(pod)]


def _of_pod(message: bytes) -> Iterator[ContainerGpus]:
    """PodResources: name 1, namespace 2, containers 3."""
    parts = fields(message)
    name, namespace = (_text(parts, number) for number in (1, 2))
    for number, container in parts:
        if number != 3:
            continue
        inner = fields(container)
        gpus = [gpu for field, each in inner if field == 2 for gpu in _of_plugin(each)]
        gpus += [gpu for field, each in inner if field == 5 for gpu in _of_claim(each)]
        if gpus:
            yield ContainerGpus(namespace, name, _text(inner, 1), tuple(dict.fromkeys(gpus)))


def _of_plugin(message: bytes) -> list[str]:
    """ContainerDevices: resource_name 1, device_ids 2. A shared GPU has ids such as UUID::3."""
    parts = fields(message)
    if not _is_gpu(_text(parts, 1)):
        return []
    ids = [value.decode(errors="replace").partition("::")[0] for number, value in parts if number == 2]
    return [uuid[0] if (uuid := _UUID.match(each)) else each for each in ids]


def _of_claim(message: bytes) -> list[str]:
    """DynamicResource: claim_resources 4; ClaimResource: cdi_devices 1 (name 1), driver_name 2, device_name 4."""
    gpus = []
    for resource in (fields(value) for number, value in fields(message) if number == 4):
        device, driver = _text(resource, 4), _text(resource, 2)
        cdi = [_text(fields(value), 1) for number, value in resource if number == 1]
        name = device or (cdi[0].rpartition("=")[2] if cdi else "")
        if name and _is_gpu(driver or (cdi[0] if cdi else "")):
            gpus.append(name)
    return gpus


def _is_gpu(name: str) -> bool:
    return bool(_GPU.search(name.lower()))


def _text(parts: list[tuple[int, bytes]], number: int) -> str:
    return next((value.decode(errors="replace") for field, value in parts if field == number), "")
