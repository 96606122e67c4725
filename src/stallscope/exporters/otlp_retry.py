"""Failures after which OTLP over gRPC may retry, and when: opentelemetry.io/docs/specs/otlp, OTLP/gRPC failures."""

from typing import Any

LATER_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
"""Names of status codes after which the same message may be sent again."""

_DETAILS = "grpc-status-details-bin"


def retry_after_s(metadata: Any) -> float | None:
    """The wait that the receiver asks for by google.rpc.RetryInfo in its trailing metadata; None without it."""
    from google.rpc.error_details_pb2 import RetryInfo

    for detail in _details(metadata):
        info = RetryInfo()
        if detail.Unpack(info):
            return max(0.0, float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9))
    return None


def is_bad_request(metadata: Any) -> bool:
    """Whether the receiver rejects the request itself as bad (google.rpc.BadRequest)."""
    from google.rpc.error_details_pb2 import BadRequest

    return any(detail.Is(BadRequest.DESCRIPTOR) for detail in _details(metadata))


def _details(metadata: Any) -> list[Any]:
    """The details of the google.rpc.Status in the trailing metadata."""
    from google.protobuf.message import DecodeError
    from google.rpc import status_pb2

    for key, value in metadata or ():
        if key == _DETAILS:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
