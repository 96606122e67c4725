"""Finds inference engines and delivers the rows of their requests once a second."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.program import Program
from stallscope.capture.serving.engine_metrics import EngineMetrics
from stallscope.capture.serving.engine_spans import EngineSpans
from stallscope.capture.serving.engines import PYTHON, Engine, Engines
from stallscope.capture.serving.requests import (
    iteration_rows,
    new_server_rows,
    open_rows,
    request_rows,
    server_rows,
    still_since_ns,
    token_rows,
    with_text_paths,
)
from stallscope.events import kernel, layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.request_clients import new_key_number

_MAX_PATHS = 10_000
STALLED_NS = 2 * 10**9
"""The code locations of an engine are recorded after this time without progress."""


class Serving:
    """The requests to the engines on this machine.

    running: the processes in scope. chosen: the processes that the user chose. note: prints a line for the user.
    metrics_every_s: interval at which the metrics of engines are read; 0: never. spans: that the engines send.
    """

    def __init__(
        self,
        node: int,
        probes: Program,
        running: Callable[[], Iterable[int]],
        *,
        chosen: Collection[int],
        note: Callable[[str], None],
        metrics_every_s: int = 0,
        spans: EngineSpans | None = None,
    ):
        self._node, self._probes, self._note = node, probes, note
        self._engines = Engines(running, chosen)
        self._metrics = EngineMetrics(metrics_every_s)
        self._spans = spans
        self._requests: list[Array] = []
        self._tokens: list[Array] = []
        self._paths: dict[tuple[int, int], bytes] = {}
        self._still_since_ns: dict[int, int] = {}
        self._client_key_number = new_key_number()
        self._is_supported = probes.records_requests

    def take(self, requests: Array, tokens: Array) -> None:
        """Keep records for the next second()."""
        if not self._is_supported:
            return
        if len(requests):
            self._requests.append(with_text_paths(requests))
        if len(tokens):
            self._tokens.append(tokens)

    def second(self, now_ns: int) -> Iterator[tuple[Table, Array]]:
        """The rows of the last second."""
        if self._spans:
            yield layout.ENGINE_SPANS, self._spans.take(self._node)
        if not self._is_supported:
            return
        known = dict(self._engines.by_pid)
        new, ended = self._engines.scan(now_ns)
        if new:
            self._record([engine for engine in new if engine.pid not in known])
            yield layout.SERVERS, new_server_rows(new, now_ns, self._node)
        if engines := known | self._engines.by_pid:
            yield from self._rows(now_ns, engines)
            self._metrics.watch(self._engines.by_pid)
            yield layout.ENGINE_METRICS, self._metrics.take(self._node)
        if ended:
            self._probes.forget_engines(ended)

    def stalled(self, now_ns: int) -> list[int]:
        """The processes of engines with an open request that has made no progress for STALLED_NS."""
        return [
            pid
            for pid, engine in self._engines.by_pid.items()
            if now_ns - self._still_since_ns.get(engine.group_pid, now_ns) > STALLED_NS
        ]

    def _record(self, new: list[Engine]) -> None:
        try:
            self._probes.record_requests([engine.pid for engine in new])
        except KernelRefused as refusal:
            self._is_supported = False
            self._requests.clear()
            self._tokens.clear()
            self._note(f"requests of inference engines are not recorded: {refusal}")
        for engine in new:
            if engine.name != PYTHON:
                model = f", model {engine.model}" if engine.model else ""
                self._note(f"process {engine.pid} belongs to an inference engine: {engine.name}{model}")

    def _rows(self, now_ns: int, engines: Mapping[int, Engine]) -> Iterator[tuple[Table, Array]]:
        waiting = open_rows(
            self._probes.connections(), self._probes.http2_connections(), self._probes.streams()
        )
        requests, self._requests = layout.joined([*self._requests, np.empty(0, kernel.REQUEST)]), []
        tokens, self._tokens = layout.joined([*self._tokens, np.empty(0, kernel.TOKEN)]), []
        self._keep_paths(requests)
        self._keep_paths(waiting["request"])
        yield (
            layout.REQUESTS,
            request_rows(requests, engines, self._node, client_key_number=self._client_key_number),
        )
        yield layout.TOKENS, token_rows(tokens, self._paths, now_ns, self._node)
        yield layout.ITERATIONS, iteration_rows(tokens, now_ns, self._node)
        servers = server_rows(waiting, engines, now_ns, self._node)
        stuck = servers[servers["oldest_progress_ns"] != UNKNOWN]
        self._still_since_ns = still_since_ns(stuck, self._still_since_ns, requests, tokens)
        yield layout.SERVERS, servers

    def _keep_paths(self, requests: Array) -> None:
        if len(self._paths) > _MAX_PATHS:
            self._paths.clear()
        keys = zip(requests["pid"].tolist(), requests["path_hash"].tolist(), strict=True)
        self._paths.update(zip(keys, requests["path"].tolist(), strict=True))
