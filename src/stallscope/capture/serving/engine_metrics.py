"""The metrics that an inference engine publishes itself: GET /metrics on its port of this machine, every few seconds.

    metrics = EngineMetrics(every_s=10)
    metrics.watch(engines)           # once a second: starts a read where one is due
    rows = metrics.take(node)        # rows of ENGINE_METRICS since the last call

Reads run in a thread, because a stuck engine does not answer. Only a port on which a process of the engine listens in
our network namespace is read, and only at a loopback address: elsewhere, another program could have the port. An engine
that fails N_FAILURES times is not read again.
"""

import http.client
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.process.process_identity import small_file
from stallscope.capture.serving.engines import PYTHON, Engine, listening_ports
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array

N_FAILURES = 3
_TIMEOUT_S = 2.0
_MAX_BYTES = 8 << 20
_DEFAULT_PORTS = {
    "vllm": 8000,
    "sglang": 30000,
    "triton": 8002,
    "tgi": 80,
    "tensorrt-llm": 8000,
    "llama.cpp": 8080,
}
_PORT = re.compile(r"\0--metrics-port[\0=](\d+)\0"), re.compile(r"\0--port[\0=](\d+)\0")
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(?:[^\"}]|\"(?:\\.|[^\"\\])*\")*\})?[ \t]+(\S+)", re.MULTILINE)

GAUGES = {
    "n_waiting": (
        *("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size"),
        *("nv_inference_pending_request_count", "llamacpp:requests_deferred"),
    ),
    "n_running": (
        *("vllm:num_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size"),
        "llamacpp:requests_processing",
    ),
    "n_preempted": ("vllm:num_preemptions_total", "vllm:num_preemptions", "sglang:num_retracted_reqs"),
    "n_prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "n_prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}
"""Columns of ENGINE_METRICS, and the names that engines give to their values: the first name that exists is read."""

KV_SHARES = (
    *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "llamacpp:kv_cache_usage_ratio",
)


class Times(NamedTuple):
    """A sum and a number of times since the start of the engine. unit_ns: of the sum."""

    total: str
    n: str
    unit_ns: float


def _histogram(name: str) -> Times:
    return Times(f"{name}_sum", f"{name}_count", 1e9)


def _triton(name: str) -> Times:
    return Times(f"nv_inference_{name}_duration_us", "nv_inference_request_success", 1e3)


TIMES = {
    "queue": (
        *(_histogram("vllm:request_queue_time_seconds"), _histogram("sglang:queue_time_seconds")),
        *(_histogram("tgi_request_queue_duration"), _triton("queue")),
    ),
    "prefill": (_histogram("vllm:request_prefill_time_seconds"),),
    "decode": (_histogram("vllm:request_decode_time_seconds"), _triton("compute_infer")),
    "first": (
        _histogram("vllm:time_to_first_token_seconds"),
        _histogram("sglang:time_to_first_token_seconds"),
    ),
    "between": (
        *(_histogram("vllm:inter_token_latency_seconds"), _histogram("vllm:time_per_output_token_seconds")),
        *(
            _histogram("sglang:inter_token_latency_seconds"),
            _histogram("sglang:time_per_output_token_seconds"),
        ),
        _histogram("tgi_request_mean_time_per_token_duration"),
        Times("llamacpp:tokens_predicted_seconds_total", "llamacpp:tokens_predicted_total", 1e9),
    ),
    "whole": (
        *(_histogram("vllm:e2e_request_latency_seconds"), _histogram("sglang:e2e_request_latency_seconds")),
        *(_histogram("tgi_request_duration"), _triton("request")),
    ),
}


def values(text: str) -> dict[str, float]:
    """The sums over the labels of each metric of a page in Prometheus' text format; the lines of buckets are left out.

    A share (KV_SHARES) is the largest of its values.
    """
    out: dict[str, float] = {}
    for name, number in _LINE.findall(text):
        if name.endswith("_bucket"):
            continue
        with suppress(ValueError):
            value = float(number)
            out[name] = max(out.get(name, 0.0), value) if name in KV_SHARES else out.get(name, 0.0) + value
    return out


def metric_row(text: str, engine: Engine, now_ns: int) -> Array:
    """A row of ENGINE_METRICS from a page; no row if the page has no known metric."""
    found, row = values(text), layout.empty(layout.ENGINE_METRICS, 1)
    for column, names in GAUGES.items():
        row[column] = next((round(found[name]) for name in names if name in found), UNKNOWN)
    row["kv_permille"] = next((round(1000 * found[name]) for name in KV_SHARES if name in found), UNKNOWN)
    for column, choices in TIMES.items():
        known = next((each for each in choices if each.total in found and each.n in found), None)
        row[f"n_{column}"] = round(found[known.n]) if known else UNKNOWN
        row[f"{column}_ns"] = round(found[known.total] * known.unit_ns) if known else UNKNOWN
    columns = (*GAUGES, "kv_permille", *(f"n_{each}" for each in TIMES))
    if all(int(row[column][0]) == UNKNOWN for column in columns):
        return layout.empty(layout.ENGINE_METRICS)
    row["ts_ns"], row["pid"], row["group_pid"] = now_ns, engine.pid, engine.group_pid
    row["engine"], row["model"] = engine.name.encode(), engine.model.encode()
    return row


@dataclass
class EngineMetrics:
    """every_s: the interval of the reads; 0: no reads."""

    every_s: int
    proc: Path = Path("/proc")
    _due_s: dict[int, float] = field(default_factory=dict)
    _failures: dict[int, int] = field(default_factory=dict)
    _rows: list[Array] = field(default_factory=list)
    _reader: threading.Thread | None = None

    def watch(self, engines: Mapping[int, Engine]) -> None:
        """Start to read the engines that are due, if no read is running."""
        if not self.every_s or (self._reader and self._reader.is_alive()):
            return
        now_s = time.monotonic()
        self._due_s = {pid: due_s for pid, due_s in self._due_s.items() if pid in engines}
        due = [
            each
            for each in engines.values()
            if each.name != PYTHON
            and self._failures.get(each.pid, 0) < N_FAILURES
            and now_s >= self._due_s.setdefault(each.pid, now_s)
        ]
        if not due:
            return
        self._due_s |= {each.pid: now_s + self.every_s for each in due}
        self._reader = threading.Thread(target=self._read, args=(due,), name="engine-metrics", daemon=True)
        self._reader.start()

    def take(self, node: int) -> Array:
        """The rows of ENGINE_METRICS since the last call."""
        rows, self._rows = self._rows, []
        out = layout.joined([layout.empty(layout.ENGINE_METRICS), *rows])
        out["node"] = node
        return out

    def _read(self, engines: Iterable[Engine]) -> None:
        for engine in engines:
            port = metrics_port(self.proc, engine)
            if not port:
                continue
            rows = metric_row(page(port), engine, time.monotonic_ns())
            self._rows.append(rows)
            self._failures[engine.pid] = 0 if len(rows) else self._failures.get(engine.pid, 0) + 1


def metrics_port(proc: Path, engine: Engine) -> int:
    """The port of an engine's metrics, if the process listens on it at a loopback address of our network namespace.

    Without a number on the command line: the default port of the engine, or the only port of the process. 0: none.
    """
    if not (own := _network_namespace(proc / "self")) or own != _network_namespace(proc / str(engine.pid)):
        return 0
    ports = listening_ports(proc, engine.pid)
    words = small_file(f"{proc}/{engine.pid}/cmdline", 1 << 16).decode("utf-8", "replace")
    matches = [match for pattern in _PORT if (match := pattern.search(words))]
    chosen = int(matches[0][1]) if matches else _DEFAULT_PORTS.get(engine.name, 0)
    if chosen in ports:
        return chosen
    return next(iter(ports)) if len(ports) == 1 else 0


def _network_namespace(process_dir: Path) -> str:
    """The name of a process's network namespace; empty if the process has ended."""
    try:
        return str((process_dir / "ns/net").readlink())
    except OSError:
        return ""


def page(port: int) -> str:
    """The page of metrics at a port of this machine; empty without an answer of status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    with suppress(OSError, http.client.HTTPException), closing(connection):
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read(_MAX_BYTES).decode("utf-8", "replace")
        return text if response.status == http.client.OK else ""
    return ""
