"""The reference decoder of logs: protobuf objects and loops, slow and simple."""

from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from stallscope.errors import BadInput
from stallscope.receive.any_value import any_value, as_dict
from stallscope.receive.decoded import AttributesBuilder, FlatRecords, Group
from stallscope.receive.logs import RecordColumns, flat_records, group_of_scope


def by_loop(body: bytes, now_ns: int) -> FlatRecords:
    """Decode with protobuf's own parser and a loop over all attributes."""
    try:
        message = ExportLogsServiceRequest.FromString(body)
    except DecodeError as error:
        raise BadInput(f"the request is not a valid OTLP logs message: {error}") from error
    groups: list[Group] = []
    records: list[Any] = []
    group_of: list[int] = []
    for number, resource_logs in enumerate(message.resource_logs):
        resource = as_dict(resource_logs.resource.attributes)
        for scope_logs in resource_logs.scope_logs:
            group_of += [len(groups)] * len(scope_logs.log_records)
            groups.append(group_of_scope(resource, resource_logs, scope_logs, number))
            records += scope_logs.log_records
    attributes, bodies = AttributesBuilder(), AttributesBuilder()
    for number, record in enumerate(records):
        for pair in record.attributes:
            attributes.add(number, pair.key, any_value(pair.value))
        bodies.add(number, "", any_value(record.body))
    body_values = bodies.attributes()
    columns = RecordColumns(
        time=np.array([r.time_unix_nano for r in records], np.uint64),
        observed=np.array([r.observed_time_unix_nano for r in records], np.uint64),
        severity=np.array([r.severity_number for r in records], np.int32),
        severity_text=pa.array([r.severity_text for r in records], pa.string()),
        event_name=pa.array([r.event_name for r in records], pa.string()),
        flags=np.array([r.flags for r in records], np.uint32),
        dropped=np.array([r.dropped_attributes_count for r in records], np.uint32),
        trace_id=pa.array([r.trace_id.hex() or None for r in records], pa.string()),
        span_id=pa.array([r.span_id.hex() or None for r in records], pa.string()),
        body=(body_values.text, body_values.integer, body_values.number, body_values.truth, body_values.json),
    )
    return flat_records(columns, attributes.attributes(), np.array(group_of, np.int64), groups, now_ns)
