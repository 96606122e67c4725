"""The metrics and incidents that a running agent exports: Prometheus and OTLP, each only on request."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stallscope.events import layout
from stallscope.events.layout import Array, Table
from stallscope.events.owner import otel_attributes
from stallscope.exporters import machine_metrics
from stallscope.exporters.late_spans import LateSpans
from stallscope.exporters.metric_updates import MetricUpdates
from stallscope.exporters.metric_values import Meter

if TYPE_CHECKING:  # imports HTTP and TLS, which an agent without --otlp does not need
    from stallscope.exporters.otlp_sender import OtlpSender

_MACHINE_EVERY_S = 5.0


@dataclass
class Outputs:
    """Receives the rows that the agent stores. All methods are quick and never wait for a network."""

    updates: MetricUpdates
    otlp: "OtlpSender | None"
    late: LateSpans
    _next_machine_s: float = 0.0

    def take(self, table: Table, rows: Array) -> None:
        """Stored rows."""
        self.updates.take(table, rows)
        if self.otlp and table is layout.REQUESTS:
            for span in self.late.take(rows):
                self.otlp.incident(**span)

    def lost(self, kind: str, n: int) -> None:
        """Lost records."""
        self.updates.lost(kind, n)

    def process_ended(self, pid: int) -> None:
        """The end of a process."""
        self.updates.process_ended(pid)

    def incident(self, line: dict[str, Any]) -> None:
        """An incident opened, changed or closed: a line of live/incident_lines.py."""
        self.updates.incident(
            line["incident"], kind=line["kind"], cause=line["cause"], is_open=line["state"] == "open"
        )
        if line["change"] == "closed" and self.otlp:
            self.otlp.incident(
                incident_id=line["incident"],
                name=f"stallscope {line['kind']}",
                begin_ns=line["begin_ns"],
                end_ns=line["end_ns"],
                summary=line["summary"],
                attributes=line["attributes"],
                owner=otel_attributes(line["verdict"]["owner"]),
            )

    def second(self, *, n_processes: int, gpus: Array | None = None) -> None:
        """Update the machine metrics, about once a second. gpus: current rows of GPUS; None without GPU sampling."""
        self.updates.n_processes(n_processes)
        if time.monotonic() < self._next_machine_s:
            return
        self._next_machine_s = time.monotonic() + _MACHINE_EVERY_S
        machine_metrics.read_machine(self.updates.meter)
        if gpus is not None:
            machine_metrics.set_gpu_metrics(self.updates.meter, gpus)


@contextmanager
def outputs(
    *,
    prometheus: str,
    otlp: str,
    node: str,
    note: Callable[[str], None],
) -> Iterator[Outputs | None]:
    """The requested outputs; None without any. prometheus: an address; otlp: a URL; empty: not requested.

    Raises BadInput for an invalid address or URL, or a missing package.
    """
    if not prometheus and not otlp:
        yield None
        return
    meter = Meter(start_wall_ns=time.time_ns(), boot_wall_ns=machine_metrics.boot_wall_ns())
    with ExitStack() as stack:
        if prometheus:
            from stallscope.exporters.prometheus import metrics_server

            port = stack.enter_context(metrics_server(meter, prometheus, node=node))
            note(f"metrics at http://{prometheus.rpartition(':')[0] or '127.0.0.1'}:{port}/metrics")
        sender = None
        if otlp:
            from stallscope.exporters.otlp_sender import otlp_sender

            sender = stack.enter_context(otlp_sender(meter, otlp, node=node, note=note))
            note(f"metrics and incidents are sent to {otlp}")
        yield Outputs(MetricUpdates(meter), sender, LateSpans(node))
