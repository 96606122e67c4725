"""The cost of a watch of 2,000 pods for the agent: memory and CPU, with changes and with watches that end.

The API is a second process. Every watch ends after 5 s, so that it restarts often; 5 pods change each second. Limits:
less than 20 MB of memory and 0.5 % of a core. Results go to results/owners_kubernetes.json.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from report import report

N_PODS, CHANGES_PER_S, WATCH_S, SECONDS = 2_000, 5, 5.0, 60.0
PARTS = ("metadata", "spec", "status")
MAX_BYTES, MAX_SHARE = 20_000_000, 0.005


def pod(number: int, version: int) -> dict[str, Any]:
    """A pod of about 6 kB, as a GPU job has it."""
    containers = [
        {
            "name": f"c{i}",
            "image": f"registry.example/team/image-{i}:{version}",
            "env": [{"name": f"VARIABLE_{n}", "value": "x" * 60} for n in range(20)],
        }
        for i in range(2)
    ]
    return {
        "metadata": {
            "name": f"trainer-{number}",
            "namespace": f"team-{number % 20}",
            "uid": f"uid-{number}",
            "resourceVersion": str(version),
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": f"job-{number // 8}",
                "kueue.x-k8s.io/queue-name": "night",
            },
            "annotations": {"note": "y" * 500},
            "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{n}": {} for n in range(120)}}],
            "ownerReferences": [{"kind": "Job", "name": f"job-{number // 8}-w", "apiVersion": "batch/v1"}],
        },
        "spec": {"containers": containers},
        "status": {
            "startTime": "2026-11-30T01:04:10Z",
            "containerStatuses": [{"containerID": f"containerd://{number:012x}{'0' * 52}"}],
        },
    }


def reduced(whole: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: whole[name] for name in names}


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        if not parts.path.startswith("/api/v1/pods"):
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        parts_sent = ("metadata",) if "PartialObjectMetadata" in self.headers["Accept"] else PARTS
        if not query.get("watch"):
            at, n = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
            more = {"continue": str(at + n)} if at + n < N_PODS else {}
            page = {
                "metadata": {"resourceVersion": "1"} | more,
                "items": [reduced(pod(i, 1), parts_sent) for i in range(at, min(at + n, N_PODS))],
            }
            self.wfile.write(json.dumps(page).encode())
            return
        end_s, number = time.monotonic() + WATCH_S, 0
        while time.monotonic() < end_s:
            number += 1
            version = time.monotonic_ns()
            event = {"type": "MODIFIED", "object": reduced(pod(version % N_PODS, version), parts_sent)}
            self.wfile.write(json.dumps(event).encode() + b"\n")
            time.sleep(1 / CHANGES_PER_S)

    def log_message(self, *words: object) -> None:
        pass


def serve() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    print(server.server_port, flush=True)
    server.serve_forever()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, report, and fail beyond a limit."""
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        before = resident_bytes()
        from stallscope.capture.owners.kube_api import KubeApi
        from stallscope.capture.owners.kubernetes import Kubernetes

        source = Kubernetes(KubeApi(f"http://127.0.0.1:{port}"), "node-7", watch_s=WATCH_S)
        is_over = threading.Event()

        def run() -> None:
            while not is_over.is_set():
                source.refresh()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not source.labels({"pod_uid": f"uid-{N_PODS - 1}"}, {}):
            time.sleep(0.1)
        listed_s, begin_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        peak = resident_bytes()
        while time.monotonic() < begin_s + SECONDS:
            time.sleep(0.5)
            peak = max(peak, resident_bytes())
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = now.ru_utime + now.ru_stime - listed_s.ru_utime - listed_s.ru_stime
        is_over.set()
        server.kill()
    result = {
        "n_pods": N_PODS,
        "changes_per_s": CHANGES_PER_S,
        "n_watches": round(SECONDS / WATCH_S),
        "added_bytes": peak - before,
        "core_share": round(cpu_s / SECONDS, 5),
    }
    is_within = result["added_bytes"] < MAX_BYTES and result["core_share"] < MAX_SHARE
    report("owners_kubernetes", result | {"is_within_limits": is_within})
    sys.exit(not is_within)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
