"""Pods from an API that replays objects and watches, GPUs from a PodResources server, owner chains of each kind."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from stallscope.capture.owners.kube_api import Gone, KubeApi
from stallscope.capture.owners.kubernetes import Kubernetes
from stallscope.capture.owners.owner_chain import chain
from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.pod_resources import ContainerGpus, PodGpus, container_gpus
from stallscope.capture.owners.unary_call import fields, unary_call

CONTAINER = "0a1b2c3d4e5f" + "0" * 52


def pod(name: str, *, version: int = 1, labels=None, owners=(), annotations=None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "vision",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels or {},
            "annotations": annotations or {},
            "ownerReferences": list(owners),
        },
        "spec": {"nodeName": "node-7", "containers": [{"name": "main", "image": "trainer"}]},
        "status": {
            "startTime": "2026-11-30T01:04:10Z",
            "containerStatuses": [
                {
                    "name": "main",
                    "image": "trainer",
                    "imageID": "sha256:1",
                    "ready": True,
                    "restartCount": 0,
                    "containerID": f"containerd://{CONTAINER}",
                }
            ],
        },
    }


def owner(kind: str, name: str, version: str = "batch/v1") -> dict[str, Any]:
    return {"kind": kind, "name": name, "apiVersion": version, "uid": f"uid-{name}", "controller": True}


def listed(pods: list[dict[str, Any]], **metadata: str) -> dict[str, Any]:
    metadata = {"resourceVersion": "5"} | metadata
    return {"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": pods}


CHAINS = {
    "Job": (pod("p", labels={"batch.kubernetes.io/job-name": "j"}, owners=[owner("Job", "j")]), "Job", "j"),
    "JobSet": (
        pod(
            "p",
            labels={"jobset.sigs.k8s.io/jobset-name": "js", "batch.kubernetes.io/job-name": "js-w-0"},
            owners=[owner("Job", "js-w-0")],
        ),
        "JobSet",
        "js",
    ),
    "PyTorchJob": (
        pod(
            "p",
            labels={"training.kubeflow.org/job-name": "t"},
            owners=[owner("PyTorchJob", "t", "kubeflow.org/v1")],
        ),
        "PyTorchJob",
        "t",
    ),
    "MPIJob worker": (
        pod(
            "p",
            labels={"training.kubeflow.org/job-name": "m"},
            owners=[owner("MPIJob", "m", "kubeflow.org/v2beta1")],
        ),
        "MPIJob",
        "m",
    ),
    "RayCluster": (
        pod("p", labels={"ray.io/cluster": "rc"}, owners=[owner("RayCluster", "rc", "ray.io/v1")]),
        "RayCluster",
        "rc",
    ),
    "RayJob": (
        pod(
            "p",
            labels={
                "ray.io/cluster": "rj-x7",
                "ray.io/originated-from-crd": "RayJob",
                "ray.io/originated-from-cr-name": "rj",
            },
            owners=[owner("RayCluster", "rj-x7", "ray.io/v1")],
        ),
        "RayJob",
        "rj",
    ),
    "LeaderWorkerSet": (
        pod(
            "p",
            labels={"leaderworkerset.sigs.k8s.io/name": "lws"},
            owners=[owner("StatefulSet", "lws-0", "apps/v1")],
        ),
        "LeaderWorkerSet",
        "lws",
    ),
    "KServe": (
        pod(
            "p",
            labels={"serving.kserve.io/inferenceservice": "llama", "pod-template-hash": "abc"},
            owners=[owner("ReplicaSet", "llama-predictor-abc", "apps/v1")],
        ),
        "InferenceService",
        "llama",
    ),
    "Deployment": (
        pod("p", labels={"pod-template-hash": "abc"}, owners=[owner("ReplicaSet", "web-abc", "apps/v1")]),
        "Deployment",
        "web",
    ),
    "Job before 1.27": (pod("p", labels={"job-name": "j"}, owners=[owner("Job", "j")]), "Job", "j"),
    "Indexed Job": (
        pod(
            "p",
            labels={"batch.kubernetes.io/job-name": "j", "job-name": "j"},
            annotations={"batch.kubernetes.io/job-completion-index": "3"},
            owners=[owner("Job", "j")],
        ),
        "Job",
        "j",
    ),
    "MPIJob launcher": (
        pod(
            "p",
            labels={
                "training.kubeflow.org/job-name": "m",
                "training.kubeflow.org/job-role": "launcher",
                "batch.kubernetes.io/job-name": "m-launcher",
            },
            owners=[owner("Job", "m-launcher")],
        ),
        "TrainingJob",
        "m",
    ),
    "RayService": (
        pod(
            "p",
            labels={
                "ray.io/cluster": "rs-raycluster-k2",
                "ray.io/originated-from-crd": "RayService",
                "ray.io/originated-from-cr-name": "rs",
            },
            owners=[owner("RayCluster", "rs-raycluster-k2", "ray.io/v1")],
        ),
        "RayService",
        "rs",
    ),
    "LLMInferenceService": (
        pod(
            "p",
            labels={
                "app.kubernetes.io/part-of": "llminferenceservice",
                "app.kubernetes.io/name": "qwen",
                "llm-d.ai/role": "both",
                "pod-template-hash": "abc",
            },
            owners=[owner("ReplicaSet", "qwen-kserve-abc", "apps/v1")],
        ),
        "LLMInferenceService",
        "qwen",
    ),
    "Volcano": (
        pod(
            "p", labels={"volcano.sh/job-name": "v"}, owners=[owner("Job", "v", "batch.volcano.sh/v1alpha1")]
        ),
        "Job",
        "v",
    ),
    "DaemonSet": (pod("p", owners=[owner("DaemonSet", "d", "apps/v1")]), "DaemonSet", "d"),
}


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_pods_and_lists_of_these_tests_are_valid(version: str):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pods = [found for found, *_ in CHAINS.values()] + [pod("p", annotations={"cost/center": "7"})]
    for each in (*pods, listed(pods), listed(pods, **{"continue": "100"})):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("kind", CHAINS)
def test_the_topmost_owner_is_named(kind):
    found, *expected = CHAINS[kind]
    result = chain(found["metadata"])
    assert [result["workload_kind"], result["workload"]] == expected


def test_a_chain_is_followed_through_owners_that_only_the_api_knows():
    """The launcher of an MPIJob: pod, Job, MPIJob; the queue is a label of the MPIJob."""
    above = {
        "m-launcher": {"labels": {}, "ownerReferences": [owner("MPIJob", "m", "kubeflow.org/v2beta1")]},
        "m": {"labels": {"kueue.x-k8s.io/queue-name": "night"}},
    }
    launcher = pod(
        "p", labels={"batch.kubernetes.io/job-name": "m-launcher"}, owners=[owner("Job", "m-launcher")]
    )
    result = chain(launcher["metadata"], lambda namespace, reference: above.get(reference["name"]))
    assert (result["workload_kind"], result["workload"], result["queue"]) == ("MPIJob", "m", "night")


@pytest.mark.parametrize(
    ("above", "labels", "expected"),
    [
        (
            [("Job", "t-node-0"), ("JobSet", "t"), ("TrainJob", "t")],
            {"jobset.sigs.k8s.io/jobset-name": "t", "batch.kubernetes.io/job-name": "t-node-0"},
            ("TrainJob", "t"),
        ),
        (
            [("PyTorchJob", "t"), ("AppWrapper", "wrapped")],
            {"training.kubeflow.org/job-name": "t"},
            ("AppWrapper", "wrapped"),
        ),
        (
            [("Job", "nightly-29"), ("CronJob", "nightly")],
            {"batch.kubernetes.io/job-name": "nightly-29"},
            ("CronJob", "nightly"),
        ),
        (
            [("StatefulSet", "lws-0"), ("Pod", "lws-0"), ("StatefulSet", "lws"), ("LeaderWorkerSet", "lws")],
            {"leaderworkerset.sigs.k8s.io/name": "lws"},
            ("LeaderWorkerSet", "lws"),
        ),
        (
            [("ReplicaSet", "q-abc"), ("Deployment", "q"), ("LLMInferenceService", "qwen")],
            {"app.kubernetes.io/part-of": "llminferenceservice", "app.kubernetes.io/name": "qwen"},
            ("LLMInferenceService", "qwen"),
        ),
        (
            [("StatefulSet", "lab"), ("Notebook", "lab")],
            {"notebook-name": "lab"},
            ("Notebook", "lab"),
        ),
    ],
    ids=lambda value: value[-1][0] if isinstance(value, list) else "",
)
def test_the_chain_of_the_api_reaches_the_topmost_owner(above, labels, expected):
    references = [owner(kind, name) for kind, name in above]
    metadata = {
        (lower["kind"], lower["name"]): {"ownerReferences": [upper]} for lower, upper in pairwise(references)
    }
    found = pod("p", labels=labels, owners=references[:1])["metadata"]
    result = chain(found, lambda namespace, each: metadata.get((each["kind"], each["name"])))
    assert (result["workload_kind"], result["workload"]) == expected


@pytest.mark.parametrize(
    ("labels", "queue", "model"),
    [
        ({"kueue.x-k8s.io/queue-name": "night"}, "night", None),
        ({"kueue.x-k8s.io/local-queue-name": "night"}, "night", None),
        ({"volcano.sh/queue-name": "gold"}, "gold", None),
        ({"serving.kserve.io/inferenceservice": "llama"}, None, "llama"),
        ({"llm-d.ai/model": "qwen3"}, None, "qwen3"),
    ],
)
def test_queue_and_model_come_from_labels(labels, queue, model):
    result = chain(pod("p", labels=labels)["metadata"])
    assert (result.get("queue"), result.get("model")) == (queue, model)


def test_a_pod_without_owner_or_with_a_loop_ends():
    assert chain({"name": "p"}) == {}
    loop = {"ownerReferences": [owner("Job", "j")]}
    assert chain(loop, lambda namespace, reference: loop)["workload"] == "j"


class Cluster:
    """An API with pods in pages, watch events, and a status to answer with instead."""

    def __init__(self, pods=(), events=(), status: int = 200):
        self.pods, self.events, self.status = list(pods), list(events), status
        self.asked: list[str] = []
        self.objects: dict[str, Any] = {}
        self.failing, self.failure = "", 503  # requests with this text in their path get this status
        self.tail, self.delay_s = b"", 0.0  # bytes after the last event; time before an answer

    def answer(self, path: str) -> tuple[int, list[dict[str, Any]]]:
        self.asked.append(path)
        parts, query = urlsplit(path), parse_qs(urlsplit(path).query)
        time.sleep(self.delay_s)
        if self.status != 200:
            return self.status, []
        if self.failing and self.failing in path:
            return self.failure, []
        if query.get("watch"):
            events, self.events = self.events, []
            return 200, events
        if parts.path in ("/api/v1/pods", "/pods"):
            at, n = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["100"])[0])
            more = {"continue": str(at + n)} if at + n < len(self.pods) else {}
            return 200, [listed(self.pods[at : at + n], **more)]
        found = self.objects.get(parts.path)
        return (200, [found]) if found else (404, [])


@contextmanager
def serving(cluster: Cluster) -> Iterator[KubeApi]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, objects = cluster.answer(self.path)
            body = b"".join(json.dumps(each).encode() + b"\n" for each in objects)
            body += cluster.tail if "watch=true" in self.path else b""
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Do not print the error of a client that disconnects: some tests do this on purpose."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield KubeApi(f"http://127.0.0.1:{server.server_port}", account=Path("/nonexistent"))
    finally:
        server.shutdown()
        server.server_close()


def source(api: KubeApi, **changes: Any) -> Kubernetes:
    return Kubernetes(api, "node-7", gpus=PodGpus(Path("/nonexistent")), **changes)


def test_pods_are_listed_in_pages_and_found_by_uid_and_by_container():
    cluster = Cluster([pod(f"p{i}") for i in range(250)])
    with serving(cluster) as api:
        pods = source(api, chosen=("team", "cost/center"))
        cluster.pods[249] = pod("last", labels={"team": "x"}, annotations={"cost/center": "7", "other": "y"})
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-p3"}, {})["pod"] == "p3"
    assert pods.labels({"pod_uid": "uid-last"}, {})["tags"] == "team=x,cost/center=7"
    assert pods.labels({"container": CONTAINER[:12]}, {})["namespace"] == "vision"
    assert pods.labels({"pod_uid": "other"}, {}) == {}
    assert all("spec.nodeName%3Dnode-7" in path for path in cluster.asked)


def test_a_watch_adds_changes_and_removes_pods_and_goes_on_at_its_version():
    first, second = pod("a"), pod("b", version=7)
    events = [
        {"type": "ADDED", "object": second},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
    ]
    cluster = Cluster([first], events)
    with serving(cluster) as api:
        pods = source(api)
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-b"}, {})["pod"] == "b"
        cluster.events = [{"type": "DELETED", "object": pod("a", version=11)}]
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-a"}, {}) == {}
        assert "resourceVersion=9" in cluster.asked[-1]
        assert sum("watch" not in path for path in cluster.asked) == 1
        cluster.events = [{"type": "ERROR", "object": {"code": 410}}]
        cluster.pods = [pod("c")]
        pods.refresh()
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-c"}, {})["pod"] == "c"
    assert pods.labels({"pod_uid": "uid-b"}, {}) == {}


@pytest.mark.parametrize(("status", "message"), [(403, "grant get, list and watch"), (500, "HTTP 500")])
def test_a_refused_request_is_an_error_in_words(status, message):
    with serving(Cluster(status=status)) as api, pytest.raises(OSError, match=message):
        source(api).refresh()


def test_owners_that_the_api_does_not_answer_cost_one_request_and_are_asked_again():
    """200 pods whose owners time out: their own labels name the workload, until the API answers."""
    named = {"batch.kubernetes.io/job-name": "own"}
    cluster = Cluster([pod(f"p{i}", labels=named, owners=[owner("Job", f"j{i}")]) for i in range(200)])
    cluster.failing = "/apis/batch"
    with serving(cluster) as api:
        pods = source(api)
        now_s = [0.0]
        pods._lookup.clock_s = lambda: now_s[0]
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-p199"}, {})["workload"] == "j199"
        assert sum("/jobs/" in path for path in cluster.asked) == 1
        cluster.failing = ""
        queue = {"labels": {"kueue.x-k8s.io/queue-name": "night"}}
        path = "/apis/batch/v1/namespaces/vision/jobs"
        cluster.objects = {f"{path}/j{i}": {"metadata": queue} for i in range(200)}
        pods.refresh()
        assert "queue" not in pods.labels({"pod_uid": "uid-p199"}, {})
        now_s[0] = 60.0
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-p199"}, {})["queue"] == "night"
    assert pods._incomplete == {}


def test_a_watch_that_a_proxy_cuts_off_goes_on_at_its_version():
    whole = {"type": "ADDED", "object": pod("a", version=7)}
    cluster = Cluster([], [whole])
    cluster.tail = json.dumps({"type": "ADDED", "object": pod("b", version=8)}).encode()[:60]
    with serving(cluster) as api:
        pods = source(api)
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-a"}, {})["pod"] == "a"
        cluster.events, cluster.tail = [{"type": "ADDED", "object": pod("b", version=8)}], b""
        pods.refresh()
    assert "resourceVersion=7" in cluster.asked[-1]
    assert pods.labels({"pod_uid": "uid-b"}, {})["pod"] == "b"


def test_a_list_that_expires_between_two_pages_begins_from_the_start():
    cluster = Cluster([pod(f"p{i}") for i in range(150)])
    cluster.failing, cluster.failure = "continue=100", 410
    with serving(cluster) as api:
        pods = source(api)
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-p0"}, {}) == {}
        cluster.failing = ""
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-p149"}, {})["pod"] == "p149"


def partial(whole: dict[str, Any]) -> dict[str, Any]:
    """The metadata that an API of 1.15 or later sends."""
    fields = {"f:metadata": {"f:labels": {}}}
    managed = [{"manager": "kubelet", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields}]
    metadata = whole["metadata"] | {"managedFields": managed, "creationTimestamp": "2026-11-30T01:04:09Z"}
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}


@pytest.mark.parametrize("form", [partial, lambda whole: whole], ids=["metadata", "whole pods"])
def test_metadata_and_whole_pods_give_the_same_labels(form):
    item = form(pod("a", labels={"job-name": "j"}, owners=[owner("Job", "j")]))
    cluster = Cluster([item])
    with serving(cluster) as api:
        pods = source(api)
        pods.refresh()
    labels = pods.labels({"pod_uid": "uid-a"}, {})
    expected = {
        "pod": "a",
        "pod_uid": "uid-a",
        "namespace": "vision",
        "workload_kind": "Job",
        "workload": "j",
    }
    assert labels == expected


@pytest.mark.parametrize("trouble", ["forbidden", "slow", "absent"])
def test_a_cluster_in_trouble_costs_one_line_and_the_other_labels_stay(trouble, monkeypatch):
    monkeypatch.setattr("stallscope.capture.owners.kube_api._TIMEOUT_S", 0.2)
    cluster = Cluster(status=403 if trouble == "forbidden" else 200)
    cluster.delay_s = 0.5 if trouble == "slow" else 0.0
    notes: list[str] = []
    with serving(cluster) as api:
        if trouble == "absent":
            api = KubeApi("http://127.0.0.1:1", account=Path("/nonexistent"))
        owned = Owners([source(api)], note=notes.append, process_labels=lambda pid, known: dict(known))
        owned.start()
        end_s = time.monotonic() + 20
        while not notes and time.monotonic() < end_s:
            owned.rows({7: {"user": "ann"}}, node=0, now_ns=1, first_ns={})
            time.sleep(0.02)
        owned.close()
    (note,) = notes
    assert note.startswith("owners of Kubernetes are incomplete: ")
    assert "\n" not in note
    assert owned.labels(7) == {"user": "ann"}


def test_a_kubelet_socket_that_fails_does_not_hide_the_pods():
    with serving(Cluster([pod("a")])) as api:
        pods = source(api)
        pods.refresh()
    with pytest.raises(OSError, match="does not answer"):
        pods.gpus.refresh()
    assert pods.labels({"pod_uid": "uid-a"}, {})["pod"] == "a"


def test_an_old_version_and_an_absent_server_are_distinguished():
    with serving(Cluster(status=410)) as api, pytest.raises(Gone):
        api.get("/api/v1/pods")
    with pytest.raises(OSError, match="does not answer"):
        KubeApi("http://127.0.0.1:1", account=Path("/nonexistent")).get("/pods")


def test_a_kubelet_is_asked_without_a_watch_and_owners_are_read_once():
    with serving(Cluster([pod("a", owners=[owner("Job", "j")])])) as api:
        pods = source(api, is_kubelet=True)
        pods.refresh()
        assert pods.labels({"pod_uid": "uid-a"}, {})["workload"] == "j"
    cluster = Cluster([pod(f"p{i}", owners=[owner("Job", "j")]) for i in range(20)])
    cluster.objects["/apis/batch/v1/namespaces/vision/jobs/j"] = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "night"}}
    }
    with serving(cluster) as api:
        pods = source(api)
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-p19"}, {})["queue"] == "night"
    assert sum("/jobs/j" in path for path in cluster.asked) == 1


# The public proto of the kubelet (v1), in the parts that matter: field numbers as in api.proto.
MESSAGES = {
    "CDIDevice": {"name": (1, "")},
    "ClaimResource": {"cdi_devices": (1, "CDIDevice"), "driver_name": (2, ""), "device_name": (4, "")},
    "DynamicResource": {"claim_name": (2, ""), "claim_resources": (4, "ClaimResource")},
    "ContainerDevices": {"resource_name": (1, ""), "device_ids": (2, "*")},
    "ContainerResources": {
        "name": (1, ""),
        "devices": (2, "ContainerDevices"),
        "dynamic_resources": (5, "DynamicResource"),
    },
    "PodResources": {"name": (1, ""), "namespace": (2, ""), "containers": (3, "ContainerResources")},
    "ListPodResourcesResponse": {"pod_resources": (1, "PodResources")},
}


def message(name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for title, parts in MESSAGES.items():
        described = file.message_type.add(name=title)
        for field, (number, kind) in parts.items():
            shape = descriptor_pb2.FieldDescriptorProto
            is_message = kind not in ("", "*")
            described.field.add(
                name=field,
                number=number,
                label=shape.LABEL_OPTIONAL if kind == "" else shape.LABEL_REPEATED,
                type=shape.TYPE_MESSAGE if is_message else shape.TYPE_STRING,
                type_name=f".v1.{kind}" if is_message else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}"))


@contextmanager
def kubelet(path: Path, answer: bytes, *, fails: bool = False) -> Iterator[Path]:
    def listed(request: bytes, context: grpc.ServicerContext) -> bytes:
        if fails:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return answer

    handler = grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister", {"List": grpc.unary_unary_rpc_method_handler(listed)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield path
    finally:
        server.stop(0).wait()


def resources(n_pods: int = 1) -> bytes:
    """For each pod: a shared GPU and a MIG instance of a device plugin, a DRA claim, and other devices."""
    answer = message("ListPodResourcesResponse")()
    for number in range(n_pods):
        described = answer.pod_resources.add(name=f"p{number}", namespace="vision")
        container = described.containers.add(name="main")
        container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-1::0", "GPU-1::1"])
        container.devices.add(resource_name="nvidia.com/mig-1g.10gb", device_ids=["MIG-2"])
        container.devices.add(resource_name="rdma/hca", device_ids=["mlx5_0"])
        container.devices.add(resource_name="nvidia.com/hostdev", device_ids=["0000:03:00.2"])
        claim = container.dynamic_resources.add(claim_name="c")
        claim.claim_resources.add(driver_name="gpu.nvidia.com", device_name="gpu-3")
        claim.claim_resources.add(driver_name="gpu.nvidia.com", device_name="gpu-5-mig-1g10gb-19-0")
        claim.claim_resources.add(driver_name="dra.example", device_name="nic-1")
        claim.claim_resources.add(driver_name="compute-domain.nvidia.com", device_name="channel-0")
        old = claim.claim_resources.add()
        old.cdi_devices.add(name="k8s.gpu.nvidia.com/device=gpu-4")
        described.containers.add(name="sidecar")
    return answer.SerializeToString()


GPUS = ("GPU-1", "MIG-2", "gpu-3", "gpu-5-mig-1g10gb-19-0", "gpu-4")
UUID = "GPU-0a1b2c3d-0000-1111-2222-0123456789ab"


@pytest.mark.parametrize(
    ("resource", "device", "gpus"),
    [
        ("amd.com/gpu", "0000:c1:00.0", ("0000:c1:00.0",)),
        ("gpu.intel.com/i915", "card0", ("card0",)),
        ("nvidia.com/gpu.shared", f"{UUID}::3", (UUID,)),
        ("nvidia.com/gpu", f"{UUID}-2", (UUID,)),
        ("nvidia.com/hostdev", "0000:03:00.2", ()),
    ],
)
def test_gpus_of_each_device_plugin(tmp_path: Path, resource, device, gpus):
    answer = message("ListPodResourcesResponse")()
    container = answer.pod_resources.add(name="p", namespace="n").containers.add(name="main")
    container.devices.add(resource_name=resource, device_ids=[device])
    with kubelet(tmp_path / "k.sock", answer.SerializeToString()) as path:
        assert [each.gpus for each in container_gpus(path)] == ([gpus] if gpus else [])


def test_gpus_of_containers_come_from_device_plugins_and_claims(tmp_path: Path):
    with kubelet(tmp_path / "k.sock", resources()) as path:
        assert container_gpus(path) == [ContainerGpus("vision", "p0", "main", GPUS)]


def test_an_answer_beyond_the_first_window_of_http2_is_read_whole(tmp_path: Path):
    assert len(resources(3000)) > 300_000
    with kubelet(tmp_path / "k.sock", resources(3000)) as path:
        assert len(container_gpus(path)) == 3000


def test_a_kubelet_that_refuses_or_is_absent_is_an_error(tmp_path: Path):
    with kubelet(tmp_path / "k.sock", b"", fails=True) as path, pytest.raises(OSError, match="refuses"):
        container_gpus(path)
    with pytest.raises(OSError, match="does not answer"):
        unary_call(tmp_path / "none.sock", "/v1.PodResourcesLister/List", b"")


@pytest.mark.parametrize("message", [b"\x0a\x05abc", b"\x0a", b"\xff"])
def test_a_message_that_is_cut_off_is_an_error(message: bytes):
    with pytest.raises(OSError, match="cut off"):
        fields(message)


def test_a_pod_has_its_gpus_as_a_label_and_as_an_allocation(tmp_path: Path):
    with kubelet(tmp_path / "k.sock", resources()) as path, serving(Cluster([pod("p0")])) as api:
        pods = Kubernetes(api, "node-7", gpus=PodGpus(path))
        pods.gpus.refresh()
        pods.refresh()
    assert pods.labels({"pod_uid": "uid-p0"}, {})["gpus"] == ",".join(GPUS)
    (allocation,) = pods.allocations()
    assert (allocation.key, allocation.gpus) == (("pod", "p0"), GPUS)
    assert allocation.owner["namespace"] == "vision"
    assert allocation.since_ns == 1_796_000_650 * 10**9
