"""Pods of this machine, with owner chain, queue and chosen labels, and the GPUs of their containers.

Pods come from a watch of the API, limited to this machine, or from the kubelet's list. Only the labels of owners are
kept of a pod. A watch that ends continues at its resource version; if that is too old, pods are listed again. While
the API does not answer requests for owners, a pod has the owners that its own labels name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stallscope.capture.owners.kube_api import Gone, KubeApi
from stallscope.capture.owners.owner_chain import chain
from stallscope.capture.owners.owner_lookup import OwnerLookup
from stallscope.capture.owners.pod_resources import ContainerGpus, PodGpus
from stallscope.capture.owners.source import Allocation, Labels
from stallscope.capture.process.time_text import wall_ns

_WATCH_S = 240.0
_KUBELET_EVERY_S = 15.0


@dataclass(frozen=True)
class Pod:
    """A pod, reduced to the labels of its owner. containers: the first twelve digits of their ids."""

    uid: str
    labels: dict[str, str]
    containers: tuple[str, ...] = ()
    started_ns: int = 0


@dataclass
class Kubernetes:
    """is_kubelet: api is the address of a kubelet. chosen: labels and annotations to keep. gpus: of containers."""

    api: KubeApi
    node: str
    is_kubelet: bool = False
    chosen: Sequence[str] = ()
    gpus: PodGpus = field(default_factory=PodGpus)
    watch_s: float = _WATCH_S
    name: str = "Kubernetes"
    every_s: float = 1.0
    _pods: dict[str, Pod] = field(default_factory=dict)
    _of_container: dict[str, str] = field(default_factory=dict)
    _version: str = ""
    _incomplete: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lookup = OwnerLookup(self.api)

    def refresh(self) -> None:
        """See Source. With the API, this is one watch: it takes minutes."""
        if self.is_kubelet:
            self.every_s = _KUBELET_EVERY_S
            self._replace(self.api.get("/pods").get("items") or [])
            return
        try:
            if not self._version:
                self._list()
            self._complete()
            self._watch()
        except Gone:
            self._version = ""

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """See Source."""
        uid = known.get("pod_uid") or self._of_container.get(known.get("container", ""), "")
        pod = self._pods.get(uid)
        if pod is None:
            return {}
        gpus = [gpu for each in self.gpus.current if self._is_of(each, pod) for gpu in each.gpus]
        return pod.labels | ({"gpus": ",".join(gpus)} if gpus else {})

    def allocations(self) -> list[Allocation]:
        """See Source."""
        pods = {
            (pod.labels.get("namespace"), pod.labels.get("pod")): pod for pod in list(self._pods.values())
        }
        by_pod: dict[tuple[str, str], list[str]] = {}
        for each in self.gpus.current:
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

    def _complete(self) -> None:
        """Ask again for the owners of pods whose owners were not answered."""
        if not self._lookup.is_paused:
            items, self._incomplete = self._incomplete, {}
            self._pods |= {uid: self._reduced(item) for uid, item in items.items() if uid in self._pods}

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
            elif event.get("type") == "DELETED":
                uid = str((item.get("metadata") or {}).get("uid"))
                self._incomplete.pop(uid, None)
                gone = self._pods.pop(uid, None)
                for container in gone.containers if gone else ():
                    self._of_container.pop(container, None)

    def _reduced(self, item: Mapping[str, Any]) -> Pod:
        metadata, status = item.get("metadata") or {}, item.get("status") or {}
        uid, self._lookup.is_unanswered = str(metadata.get("uid") or ""), False
        owners = chain(metadata) if self.is_kubelet else chain(metadata, self._lookup.metadata)
        self._incomplete.pop(uid, None)
        if self._lookup.is_unanswered:
            kept = {name: value for name, value in metadata.items() if name != "managedFields"}
            self._incomplete[uid] = {"metadata": kept, "status": status}
        words = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
        labels = {
            "pod": str(metadata.get("name") or ""),
            "pod_uid": uid,
            "namespace": str(metadata.get("namespace") or ""),
            **owners,
            "tags": ",".join(f"{name}={words[name]}" for name in self.chosen if name in words),
        }
        states = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
        ids = [str(state.get("containerID") or "").rpartition("//")[2][:12] for state in states]
        started_ns = wall_ns(str(status.get("startTime") or metadata.get("creationTimestamp") or ""))
        known = {label: value for label, value in labels.items() if value}
        return Pod(uid, known, tuple(filter(None, ids)), started_ns)
