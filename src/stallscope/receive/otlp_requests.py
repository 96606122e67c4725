"""From the bytes of an OTLP request to a batch for the store.

The event name of our agents' records names their table (`stallscope.<table>`). An NCCL operation with communicator
and round is a collective; metric points go to `node_metrics`; all other records go to `events`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput
from stallscope.receive import logs, otlp_metrics, otlp_spans, sender_aliases
from stallscope.receive.attributes import OURS
from stallscope.receive.cumulative_counters import Series
from stallscope.receive.decoded import Array, Attributes, FlatRecords, Group
from stallscope.receive.decoded_size import check_flat, check_json_body, check_otlp_body
from stallscope.receive.rows import REQUEST, about_nodes, table_rows
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch

SIGNALS = ("logs", "metrics", "traces")
BATCH_ID = "stallscope.batch.id"
MAX_ATTRS_BYTES = 1 << 20
"""Largest attributes of one record outside of its columns; a longer record alone is rejected."""

_TOO_LONG = f"the attributes of a record exceed {MAX_ATTRS_BYTES:,} bytes"
_FIRST_FIELD = 1 << 3 | 2  # of a message: field number 1, length-delimited


@dataclass(frozen=True)
class Decoded:
    """A request, ready to store. n_rejected: records left out, as too long. counts: irregularities, by counter."""

    batch: Batch
    n_records: int
    n_rejected: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodedTogether:
    """Several requests in one batch without an id, and for each request: its batch id, its rows by table, and its
    numbers of records and of rejected records.
    """

    batch: Batch
    batch_ids: list[str]
    n_rows: list[dict[str, int]]
    n_records: list[int]
    n_rejected: list[int]


@dataclass(frozen=True)
class Decoder:
    """Decodes requests. of_logs: the decoder of logs, see logs.decode(). series: state of cumulative counters.

    max_bytes: of the rows of one request.
    """

    of_logs: logs.Decoder = logs.decode
    series: Series = field(default_factory=Series)
    now_ns: Callable[[], int] = time.time_ns
    max_bytes: int = 128 << 20

    def decode(self, signal: str, body: bytes, tenant: str) -> Decoded:
        """A protobuf request of a signal. Raises BadInput, TooLarge."""
        flat = self._flat(signal, body, tenant)
        check_flat(flat, self.max_bytes)
        if signal == "logs":
            tables = _tables_of_logs(flat)
        else:
            table = "node_metrics" if signal == "metrics" else "events"
            tables = {table: table_rows(flat, table)} if flat.n else {}
        accepted = {name: _of_bearable_size(rows) for name, rows in tables.items()}
        n_rejected = flat.n - sum(len(rows) for rows in accepted.values())
        if about := about_nodes(flat, [0] * len(flat.groups)):
            accepted["nodes"] = pa.Table.from_pylist(about[0])
        batch = Batch(_batch_id(flat.groups), tenant, accepted)
        return Decoded(batch, flat.n, n_rejected, flat.counts)

    def _flat(self, signal: str, body: bytes, tenant: str) -> FlatRecords:
        if signal not in SIGNALS:
            raise BadInput(f"unknown OTLP signal {signal!r}; the signals are {', '.join(SIGNALS)}")
        check_otlp_body(signal, body, self.max_bytes)
        now_ns = self.now_ns()
        if signal == "logs":
            return self.of_logs(body, now_ns)
        if signal == "metrics":
            return otlp_metrics.decode(body, now_ns, tenant=tenant, series=self.series)
        return otlp_spans.decode(body, now_ns)

    def logs_together(self, bodies: Sequence[bytes], tenant: str) -> DecodedTogether | None:
        """Several logs requests, decoded as one, in little more time than one of them. None if each must be decoded
        alone.

        Concatenated protobuf messages are one message with the repeated fields of all (protobuf.dev, Encoding:
        "Last One Wins").
        """
        n_parts = [n for body in bodies if (n := _n_parts(body)) is not None]
        if len(n_parts) < len(bodies):
            return None
        try:
            return self._parted(bodies, tenant, np.cumsum(n_parts))
        except BadInput:
            return None

    def _parted(self, bodies: Sequence[bytes], tenant: str, ends: Array) -> DecodedTogether | None:
        whole = b"".join(bodies)
        check_otlp_body("logs", whole, self.max_bytes)
        flat = self.of_logs(whole, self.now_ns())
        check_flat(flat, self.max_bytes)
        if flat.counts or not flat.n:
            return None
        of_group = np.searchsorted(ends, [group.place for group in flat.groups], side="right")
        request = of_group[flat.group]
        flat.given[REQUEST] = pa.array(request)
        groups: list[list[Group]] = [[] for _ in bodies]
        for number, group in zip(of_group.tolist(), flat.groups, strict=True):
            groups[number].append(group)
        tables: dict[str, pa.Table] = {}
        n_rows: list[dict[str, int]] = [{} for _ in bodies]
        for name, rows in _tables_of_logs(flat).items():
            tables[name], of_request = _by_request(name, _of_bearable_size(rows))
            numbers, lengths = np.unique(of_request, return_counts=True)
            for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
                n_rows[number][name] = length
        n_records = np.bincount(request, minlength=len(bodies)).tolist()
        n_rejected = [n - sum(rows.values()) for n, rows in zip(n_records, n_rows, strict=True)]
        if about := sorted(about_nodes(flat, of_group.tolist()).items()):
            tables["nodes"] = pa.Table.from_pylist([row for _, rows in about for row in rows])
            for number, rows in about:
                n_rows[number]["nodes"] = len(rows)
        batch = Batch("", tenant, tables, sum(rows.nbytes for rows in tables.values()))
        return DecodedTogether(batch, [_batch_id(each) for each in groups], n_rows, n_records, n_rejected)


def _n_parts(body: bytes) -> int | None:
    """Number of ResourceLogs in an ExportLogsServiceRequest; None if it has other fields, or is cut off.

    Field 1 is length-delimited: its length precedes it as a varint (protobuf.dev, Encoding).
    """
    at, n = 0, 0
    while at < len(body):
        length, shift, at, tag = 0, 0, at + 1, body[at]
        while at < len(body) and body[at] >= 0x80 and shift < 28:
            length |= (body[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
        if tag != _FIRST_FIELD or at >= len(body) or body[at] >= 0x80:
            return None
        at += 1 + (length | body[at] << shift)
        n += 1
    return n if at == len(body) else None


def _by_request(table: str, rows: pa.Table) -> tuple[pa.Table, Array]:
    """The rows in the store's format, ordered by request, and the request of each."""
    request = rows[REQUEST].to_numpy()
    if (np.diff(request) < 0).any():
        order = np.argsort(request, kind="stable")
        rows, request = rows.take(pa.array(order)), request[order]
    return schema.conformed(table, rows.drop_columns(REQUEST)), request


def _tables_of_logs(flat: FlatRecords) -> dict[str, pa.Table]:
    """Rows by table. Most requests have records of only one table and are not split."""
    if not flat.n:
        return {}
    coded = flat.given["name"].dictionary_encode()
    table_of = [_table_named(name) for name in coded.dictionary.to_pylist()]
    codes = np.asarray(coded.indices.fill_null(len(table_of)))
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*table_of, ""]))}
    number_of = np.array([*(numbers[name] for name in table_of), numbers[""]])[codes]
    out: dict[str, pa.Table] = {}
    for name, number in numbers.items():
        which = number_of == number
        if which.any():
            part = flat if which.all() else _part(flat, which)
            new_tables = _of_others(part) if not name else {name: table_rows(_without_name(part), name)}
            for table, rows in new_tables.items():
                there = out.get(table)
                out[table] = (
                    rows if there is None else pa.concat_tables([there, rows], promote_options="default")
                )
    return out


def _table_named(event_name: str) -> str:
    name = event_name.removeprefix(OURS)
    return name if event_name.startswith(OURS) and name in schema.SENT and name != "events" else ""


def _without_name(flat: FlatRecords) -> FlatRecords:
    """Drop the event names of our agents' records: the table states the same, and the records have no body."""
    return FlatRecords(
        flat.n,
        {name: flat.given[name] for name in ("ts_ns", REQUEST) if name in flat.given},
        {k: v for k, v in flat.extra.items() if k != "otel.severity_number"},
        flat.attributes,
        flat.group,
        flat.groups,
    )


def _of_others(flat: FlatRecords) -> dict[str, pa.Table]:
    """Records of other senders: known collectives go to `collectives`, all others to `events`."""
    rows = table_rows(flat, "events")
    if not {"op", "comm_hash", "seq"} <= set(rows.column_names):
        return {"events": rows}
    known = pa.array(sorted(sender_aliases.COLLECTIVE_OPS))
    is_one = pc.and_(
        pc.is_in(rows["op"], known), pc.and_(rows["comm_hash"].is_valid(), rows["seq"].is_valid())
    )
    n_collectives = pc.sum(is_one).as_py() or 0
    if n_collectives == len(rows):
        return {"collectives": rows}
    if not n_collectives:
        return {"events": rows}
    return {"collectives": rows.filter(is_one), "events": rows.filter(pc.invert(is_one))}


def _part(flat: FlatRecords, which: Array) -> FlatRecords:
    """The selected records."""
    at = pa.array(np.flatnonzero(which))
    number_of = np.cumsum(which) - 1
    listed = flat.attributes.listed()
    is_selected = which[listed.parent]
    there = pa.array(np.flatnonzero(is_selected))
    attributes = Attributes(
        number_of[listed.parent[is_selected]],
        *(
            column.take(there)
            for column in (listed.key, listed.text, listed.integer, listed.number, listed.truth, listed.json)
        ),
    )
    return FlatRecords(
        int(which.sum()),
        {name: values.take(at) for name, values in flat.given.items()},
        {name: values.take(at) for name, values in flat.extra.items()},
        attributes,
        flat.group[which],
        flat.groups,
    )


def _of_bearable_size(rows: pa.Table) -> pa.Table:
    if "attrs" not in rows.column_names:
        return rows
    lengths = pc.binary_length(rows["attrs"])
    if (pc.max(lengths).as_py() or 0) <= MAX_ATTRS_BYTES:
        return rows
    return rows.filter(pc.less_equal(lengths.fill_null(0), MAX_ATTRS_BYTES))


def _batch_id(groups: Sequence[Group]) -> str:
    """The id by which a retry of this request is recognised; empty if the sender sets none.

    Never the content: a sender may state the same record twice within the resolution of its clock.
    """
    ids = [group.resource.get(BATCH_ID) for group in groups]
    if ids and isinstance(ids[0], str) and all(batch_id == ids[0] for batch_id in ids):
        return ids[0][:200]
    return ""


def json_to_protobuf(signal: str, body: bytes, *, limit: int = Decoder.max_bytes) -> bytes:
    """OTLP's JSON format as protobuf. limit: bytes of the objects in memory. Raises BadInput, TooLarge.

    It differs from protobuf's own JSON in the ids of traces and spans, which are hexadecimal.
    """
    import base64
    import json

    from google.protobuf import json_format

    def with_bytes(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in _IDS and isinstance(value, str)
            else value
            for key, value in pairs
        }

    check_json_body(body, limit)
    try:
        content = json.loads(body, object_pairs_hook=with_bytes)
        message = json_format.ParseDict(
            content, _message(signal), ignore_unknown_fields=True, max_recursion_depth=40
        )
    except (ValueError, RecursionError, json_format.ParseError) as error:
        raise BadInput(
            f"the request is not a valid OTLP {signal} message in JSON: {str(error)[:200]}"
        ) from error
    packed: bytes = message.SerializeToString()
    return packed


_IDS = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})


def _message(signal: str) -> Any:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    kinds: dict[str, Any] = {
        "logs": ExportLogsServiceRequest,
        "metrics": ExportMetricsServiceRequest,
        "traces": ExportTraceServiceRequest,
    }
    return kinds[signal]()


def response(signal: str, n_rejected: int) -> Any:
    """The Export...ServiceResponse; with a partial success if records were rejected."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    kinds: dict[str, tuple[Any, str]] = {
        "logs": (ExportLogsServiceResponse, "rejected_log_records"),
        "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
        "traces": (ExportTraceServiceResponse, "rejected_spans"),
    }
    kind, name = kinds[signal]
    message = kind()
    if n_rejected:
        setattr(message.partial_success, name, n_rejected)
        message.partial_success.error_message = _TOO_LONG
    return message
