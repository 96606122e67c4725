"""The rows of a batch as OTLP logs: for collectors, and hubs without the Arrow endpoint.

One record for each row. Its event name is `stallscope.<table>`; its attributes are the row's columns under their own
names. Numbers of an enumeration become the words of events/names.py; unknown values are left out. The resource
names the node, the cluster and the batch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stallscope.events.layout import UNKNOWN, Array, Field
from stallscope.events.names import CATEGORY_NAMES, Category, Datatype, Op
from stallscope.exporters.hub_batches import TABLES

METHOD = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
SCOPE = "stallscope.agent"
_WORDS = {"op": Op, "in_call": Op, "category": Category, "datatype": Datatype}
_HASHES = frozenset({"comm_hash", "parent_hash", "comm_handle", "stream"})
"""Unsigned 64-bit numbers, as 16 hexadecimal digits because OTLP has no such type."""
_INFO = 9
_WARN = 13


def request(
    tables: Mapping[str, Array], *, batch_id: str, node: str, cluster: str, about: Mapping[str, str]
) -> bytes:
    """An ExportLogsServiceRequest in protobuf."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    message = ExportLogsServiceRequest()
    resource = message.resource_logs.add()
    facts = {
        "service.name": "stallscope-agent",
        "host.name": node,
        "stallscope.node.id": node,
        "stallscope.cluster.id": cluster,
        "stallscope.batch.id": batch_id,
        **{f"stallscope.{name}": value for name, value in about.items()},
    }
    for key, fact in facts.items():
        resource.resource.attributes.add(key=key).value.string_value = fact
    scope = resource.scope_logs.add()
    scope.scope.name = SCOPE
    for name, rows in tables.items():
        severity = _WARN if name == "losses" else _INFO
        for attributes, ts_ns in zip(_attributes(name, rows), rows["ts_ns"].tolist(), strict=True):
            record = scope.log_records.add(
                time_unix_nano=max(0, ts_ns),
                observed_time_unix_nano=max(0, ts_ns),
                severity_number=severity,
                event_name=f"stallscope.{name}",
            )
            for key, value in attributes:
                filled = record.attributes.add(key=key).value
                if isinstance(value, str):
                    filled.string_value = value
                else:
                    filled.int_value = value
    sent: bytes = message.SerializeToString()
    return sent


def _attributes(name: str, rows: Array) -> Iterator[list[tuple[str, str | int]]]:
    """Key and value of the known columns, row by row."""
    columns = [_column(f, rows[f.name]) for f in TABLES[name].fields if f.name in (rows.dtype.names or ())]
    for values in zip(*columns, strict=True):
        yield [pair for pairs in values for pair in pairs]


def _column(field: Field, values: Array) -> Iterator[list[tuple[str, str | int]]]:
    """For each row: nothing, one pair, or the ledger's pairs."""
    if field.name == "ts_ns":
        return iter([[] for _ in range(len(values))])
    if field.format.startswith("("):
        keys = [f"stallscope.{category}_ns" for category in CATEGORY_NAMES]
        return (list(zip(keys, row, strict=True)) for row in values.tolist())
    key = f"stallscope.{field.name}"
    return ([] if value is None else [(key, value)] for value in _otlp_values(field, values))


def _otlp_values(field: Field, values: Array) -> Iterator[Any]:
    """The values as types of OTLP; None for unknown."""
    plain = values.tolist()
    if field.format.startswith("S"):
        return (value.decode("utf-8", "replace") or None for value in plain)
    if field.name in _HASHES:
        return (f"{value:016x}" for value in plain)
    if field.name in _WORDS:
        words = {int(member): member.name.lower() for member in _WORDS[field.name]}
        return (words.get(value) if value else None for value in plain)
    return (None if field.may_be_unknown and value == UNKNOWN else value for value in plain)
