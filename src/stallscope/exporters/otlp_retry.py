"""What OTLP over gRPC says may be sent again, and when: opentelemetry.io/docs/specs/otlp, OTLP/gRPC failures."""

from typing import Any

LATER_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
"""Names of status codes after which the same message may be sent again."""

_DETAILS = "grpc-status-details-bin"


def retry_after_s(metadata: Any) -> float | None:
    """What the far end asked for by google.rpc.RetryInfo in its trailing metadata; None where it did not."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    for key, value in metadata or ():
        if key != _DETAILS:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        for detail in status.details:
            info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                return max(0.0, float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9))
    return None
