"""The metrics of engines: pages of several engines, the port, and reads of a real page."""

import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.serving.engine_metrics import EngineMetrics, metric_row, metrics_port
from stallscope.capture.serving.engines import Engine
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b}"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a {b}"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.975
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 50.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.5
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 50.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1e-3
"""
TRITON = """nv_inference_request_success{model="m",version="1"} 4
nv_inference_request_success{model="n",version="1"} 6
nv_inference_queue_duration_us{model="m",version="1"} 700
nv_inference_queue_duration_us{model="n",version="1"} 300
nv_inference_pending_request_count{model="m",version="1"} 2
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 4
llamacpp:tokens_predicted_total 200
llamacpp:tokens_predicted_seconds_total 0.5
"""
ENGINE = Engine(os.getpid(), "vllm", "m", 5)


def number(text: str, column: str) -> int:
    return int(metric_row(text, ENGINE, 9)[column][0])


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        (VLLM, "n_running", 3),
        (VLLM, "n_waiting", 7),
        (VLLM, "kv_permille", 975),  # the fullest of several caches
        (VLLM, "n_preempted", 2),
        (VLLM, "n_prefix_hits", 40),
        (VLLM, "n_first", 50),
        (VLLM, "first_ns", 2_500_000_000),
        (VLLM, "queue_ns", 1_000_000),
        (VLLM, "n_decode", UNKNOWN),
        (TRITON, "n_queue", 10),  # of all models
        (TRITON, "queue_ns", 1_000_000),
        (TRITON, "n_waiting", 2),
        (LLAMA, "n_waiting", 4),
        (LLAMA, "between_ns", 500_000_000),
        (LLAMA, "kv_permille", UNKNOWN),
    ],
)
def test_values_of_a_page(text, column, value):
    assert number(text, column) == value


def test_a_page_without_known_metrics_gives_no_row():
    assert len(metric_row("python_gc_objects_collected_total 3\n<html>", ENGINE, 9)) == 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(VLLM.encode())

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def proc_with(folder: Path, command: str, *, namespace: str = "") -> Path:
    """A copy of this process in /proc, with another command line."""
    home = folder / str(os.getpid())
    (home / "ns").mkdir(parents=True)
    (folder / "self" / "ns").mkdir(parents=True)
    (home / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (home / "fd").symlink_to("/proc/self/fd")
    (home / "net").symlink_to("/proc/self/net")
    own = Path("/proc/self/ns/net").readlink()
    (folder / "self" / "ns" / "net").symlink_to(own)
    (home / "ns" / "net").symlink_to(namespace or own)
    return folder


def test_a_read_of_a_real_page(tmp_path, port):
    proc = proc_with(tmp_path, f"vllm serve m --port {port}")
    metrics = EngineMetrics(10, proc)
    rows = layout.empty(layout.ENGINE_METRICS)
    end_s = time.monotonic() + 20
    while not len(rows) and time.monotonic() < end_s:
        metrics.watch({ENGINE.pid: ENGINE})
        rows = np.concatenate([rows, metrics.take(node=3)])
    assert (int(rows["node"][0]), int(rows["n_running"][0]), rows["engine"][0]) == (3, 3, b"vllm")


def test_an_engine_in_another_network_namespace_is_not_read(tmp_path, port):
    proc = proc_with(tmp_path, f"vllm serve m --port {port}", namespace="net:[1]")
    assert metrics_port(proc, ENGINE) == 0


def test_a_port_on_which_the_engine_does_not_listen_is_not_read(tmp_path, port):
    proc = proc_with(tmp_path, "vllm serve m --port 1")
    assert metrics_port(proc, ENGINE) in (0, port)  # port: if this process has no other port
