"""From the metadata of a pod to its workload, queue and model, by the labels that controllers set on pods.

Sources: the API reference of Kubernetes 1.34 (Job), and the documentation of JobSet 0.8, Kubeflow trainer 1.9, KubeRay
1.4, Kueue 0.13, LeaderWorkerSet 0.7, KServe 0.16, llm-d 0.3, Volcano 1.12.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Metadata = Mapping[str, Any]
Lookup = Callable[[str, Mapping[str, Any]], Metadata | None]
"""From a namespace and an owner reference to the metadata of the owner; None if it is not known."""

_MAX_OWNERS = 6
_LLM_SERVICE = "serving.kserve.io/llminferenceservice"
_KINDS = (
    ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    ("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
    ("serving.kserve.io/inferenceservice", "InferenceService"),
    (_LLM_SERVICE, "LLMInferenceService"),
    ("ray.io/cluster", "RayCluster"),
    ("volcano.sh/job-name", "VolcanoJob"),
    ("training.kubeflow.org/job-name", "TrainingJob"),
    ("batch.kubernetes.io/job-name", "Job"),
    ("job-name", "Job"),
)
"""Label with the workload's name -> kind, the topmost first."""

_ORIGIN = ("ray.io/originated-from-crd", "ray.io/originated-from-cr-name")
"""Kind and name of the object that made a RayCluster: RayJob, RayService."""

_QUEUES = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/local-queue-name", "volcano.sh/queue-name")
_MODELS = ("llm-d.ai/model", "serving.kserve.io/inferenceservice", _LLM_SERVICE)


def chain(pod: Metadata, lookup: Lookup = lambda namespace, reference: None) -> dict[str, str]:
    """workload_kind, workload, queue and model of a pod. lookup: asked for owners above the pod's own owner."""
    owners = _owners(pod, lookup)
    labels = _merged([pod, *(metadata for _, _, metadata in owners)])
    if labels.get("app.kubernetes.io/part-of") == "llminferenceservice":
        labels.setdefault(_LLM_SERVICE, labels.get("app.kubernetes.io/name", ""))
    top = owners[-1][:2] if owners else None
    kind, name = _by_labels(labels, [name for _, name, _ in owners]) or top or ("", "")
    if kind == "ReplicaSet" and (hash_ := labels.get("pod-template-hash")):
        kind, name = "Deployment", name.removesuffix(f"-{hash_}")
    found = {
        "workload_kind": kind,
        "workload": name,
        "queue": _first(labels, _QUEUES),
        "model": _first(labels, _MODELS),
    }
    return {label: value for label, value in found.items() if value}


def _owners(pod: Metadata, lookup: Lookup) -> list[tuple[str, str, Metadata]]:
    """The controlling owners, from the pod upwards: kind, name, metadata (empty if not known)."""
    owners: list[tuple[str, str, Metadata]] = []
    metadata: Metadata | None = pod
    while metadata and len(owners) < _MAX_OWNERS and (reference := _controller(metadata)):
        metadata = lookup(str(pod.get("namespace", "")), reference)
        owners.append((str(reference.get("kind", "")), str(reference.get("name", "")), metadata or {}))
    return owners


def _controller(metadata: Metadata) -> Mapping[str, Any] | None:
    references = metadata.get("ownerReferences") or []
    return next(
        (each for each in references if each.get("controller")), references[0] if references else None
    )


def _merged(objects: Sequence[Metadata]) -> dict[str, str]:
    """The labels of a pod and its owners; the lower object has priority."""
    labels: dict[str, str] = {}
    for metadata in reversed(objects):
        labels |= {str(name): str(value) for name, value in (metadata.get("labels") or {}).items()}
    return labels


def _by_labels(labels: Mapping[str, str], owners: Sequence[str]) -> tuple[str, str] | None:
    """Kind and name by the labels; None if the owner references reach at least as high."""
    if all(labels.get(name) for name in _ORIGIN):
        return labels[_ORIGIN[0]], labels[_ORIGIN[1]]
    for label, kind in _KINDS:
        name = labels.get(label)
        if not name:
            continue
        return None if name in owners or (owners and kind == "Job") else (kind, name)
    return None


def _first(labels: Mapping[str, str], names: Sequence[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")
