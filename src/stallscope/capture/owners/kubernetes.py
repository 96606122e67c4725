"""Pods of this machine, with owner chain, queue and chosen labels, and the GPUs of their containers.

Pods come from a watch of the API, limited to this machine, or from the kubelet's list. Only the labels of owners are
kept of a pod. A watch that ends continues at its resource version; one that is too old begins with a list again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stallscope.capture.owners.kube_api import Gone, KubeApi
from stallscope.capture.owners.owner_chain import Metadata, chain
from stallscope.capture.owners.pod_resources import SOCKET, ContainerGpus, container_gpus
from stallscope.capture.owners.source import Allocation, Labels
from stallscope.capture.process.time_text import wall_ns

_WATCH_S = 240.0
_KUBELET_EVERY_S = 15.0
_MAX_OWNERS = 4096
_PLURALS = {"ReplicaSet": "replicasets", "RayCluster": "rayclusters", "RayJob": "rayjobs"}


@dataclass(frozen=True)
class Pod:
    """A pod, reduced to the labels of its owner. containers: the first twelve digits of their ids."""

    uid: str
    labels: dict[str, str]
    containers: tuple[str, ...] = ()
    started_ns: int = 0


@dataclass
class Kubernetes:
    """is_kubelet: api is the address of a kubelet. chosen: labels and annotations to keep. socket: of PodResources."""

    api: KubeApi
    node: str
    is_kubelet: bool = False
    chosen: Sequence[str] = ()
    socket: Path = SOCKET
    watch_s: float = _WATCH_S
    name: str = "Kubernetes"
    every_s: float = 1.0
    _pods: dict[str, Pod] = field(default_factory=dict)
    _of_container: dict[str, str] = field(default_factory=dict)
    _gpus: list[ContainerGpus] = field(default_factory=list)
    _version: str = ""
    _owners: dict[tuple[str, str, str], Metadata | None] = field(default_factory=dict)

    def refresh(self) -> None:
        """See Source. With the API, this is one watch: it takes minutes."""
        self._gpus = container_gpus(self.socket) if self.socket.exists() else []
        if self.is_kubelet:
            self.every_s = _KUBELET_EVERY_S
            self._replace(self.api.get("/pods").get("items") or [])
            return
        try:
            self._list() if not self._version else None
            self._watch()
        except Gone:
            self._version = ""

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """See Source."""
        uid = known.get("pod_uid") or self._of_container.get(known.get("container", ""), "")
        pod = self._pods.get(uid)
        if pod is None:
            return {}
        gpus = [gpu for each in self._gpus if self._is_of(each, pod) for gpu in each.gpus]
        return pod.labels | ({"gpus": ",".join(gpus)} if gpus else {})

    def allocations(self) -> list[Allocation]:
        """See Source."""
        pods = {
            (pod.labels.get("namespace"), pod.labels.get("pod")): pod for pod in list(self._pods.values())
        }
        by_pod: dict[tuple[str, str], list[str]] = {}
        for each in self._gpus:
            by_pod.setdefault((each.namespace, each.pod), []).extend(each.gpus)
        out = []
        for (namespace, name), gpus in by_pod.items():
            pod = pods.get((namespace, name))
            labels = pod.labels if pod else {"namespace": namespace, "pod": name}
            out.append(Allocation(("pod", name), labels, tuple(gpus), pod.started_ns if pod else 0))
        return out

    def _is_of(self, gpus: ContainerGpus, pod: Pod) -> bool:
        return (gpus.namespace, gpus.pod) == (pod.labels.get("namespace"), pod.labels.get("pod"))

    @property
    def _selector(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.nodeName={self.node}"}

    def _list(self) -> None:
        pods: dict[str, Pod] = {}
        version = ""
        for page in self.api.pages("/api/v1/pods", **self._selector):
            version = str((page.get("metadata") or {}).get("resourceVersion") or version)
            for item in page.get("items") or []:
                pod = self._reduced(item)
                pods[pod.uid] = pod
        self._version = version
        self._take(pods)

    def _replace(self, items: Sequence[Mapping[str, Any]]) -> None:
        self._take({pod.uid: pod for pod in map(self._reduced, items)})

    def _take(self, pods: dict[str, Pod]) -> None:
        self._of_container = {container: pod.uid for pod in pods.values() for container in pod.containers}
        self._pods = pods

    def _watch(self) -> None:
        params = self._selector | {"resourceVersion": self._version}
        for event in self.api.watch("/api/v1/pods", timeout_s=self.watch_s, **params):
            item = event.get("object") or {}
            self._version = str((item.get("metadata") or {}).get("resourceVersion") or self._version)
            if event.get("type") in ("ADDED", "MODIFIED"):
                pod = self._reduced(item)
                self._pods[pod.uid] = pod
                self._of_container |= dict.fromkeys(pod.containers, pod.uid)
                self._gpus = container_gpus(self.socket) if self.socket.exists() else []
            elif event.get("type") == "DELETED":
                gone = self._pods.pop(str((item.get("metadata") or {}).get("uid")), None)
                for container in gone.containers if gone else ():
                    self._of_container.pop(container, None)

    def _reduced(self, item: Mapping[str, Any]) -> Pod:
        metadata, status = item.get("metadata") or {}, item.get("status") or {}
        words = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
        labels = {
            "pod": str(metadata.get("name") or ""),
            "pod_uid": str(metadata.get("uid") or ""),
            "namespace": str(metadata.get("namespace") or ""),
            **chain(metadata, self._owner),
            "tags": ",".join(f"{name}={words[name]}" for name in self.chosen if name in words),
        }
        states = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
        ids = [str(state.get("containerID") or "").rpartition("//")[2][:12] for state in states]
        started_ns = wall_ns(str(status.get("startTime") or metadata.get("creationTimestamp") or ""))
        known = {label: value for label, value in labels.items() if value}
        return Pod(labels["pod_uid"], known, tuple(filter(None, ids)), started_ns)

    def _owner(self, namespace: str, reference: Mapping[str, Any]) -> Metadata | None:
        """The metadata of an owner from the API; None if it cannot be read. Each owner is read once."""
        if self.is_kubelet:
            return None
        kind, name, version = (str(reference.get(key, "")) for key in ("kind", "name", "apiVersion"))
        key = (namespace, kind, name)
        if key not in self._owners:
            if len(self._owners) >= _MAX_OWNERS:
                self._owners.clear()
            group = f"/apis/{version}" if "/" in version else f"/api/{version}"
            plural = _PLURALS.get(kind, f"{kind.lower()}s")
            path = f"{group}/namespaces/{quote(namespace)}/{plural}/{quote(name)}"
            try:
                metadata = self.api.get(path).get("metadata") or {}
                self._owners[key] = {part: metadata.get(part) for part in ("labels", "ownerReferences")}
            except (OSError, ValueError):
                self._owners[key] = None
        return self._owners[key]
