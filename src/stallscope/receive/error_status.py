"""Errors in OTLP's formats: gRPC codes and google.rpc details, HTTP statuses with the same details as body.

A request that may succeed later gets UNAVAILABLE and RetryInfo, or 503 and Retry-After. BadRequest marks an error
of the request itself: a retry with the same bytes is useless.
"""

import math
from dataclasses import dataclass
from typing import Any

from stallscope.errors import (
    BadInput,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    StallscopeError,
    StorageFailed,
    TooLarge,
    TooMany,
)

_STORAGE_RETRY_S = 10.0
_STORAGE = "the hub cannot read or write its data now; its log has the reason"
_INTERNAL = "the hub failed to handle this request; its log has the reason"


@dataclass(frozen=True)
class Refusal:
    """The answer to a sender. grpc: name of the gRPC code; code: its number; retry_after_s: None: do not retry."""

    grpc: str
    code: int
    http: int
    message: str
    retry_after_s: float | None = None


def refusal(error: Exception) -> Refusal:
    """The answer to an error."""
    message = str(error)
    if isinstance(error, Overloaded):
        return Refusal("UNAVAILABLE", 14, 503, message, error.retry_after_s)
    if isinstance(error, StorageFailed):
        return Refusal("UNAVAILABLE", 14, 503, _STORAGE, _STORAGE_RETRY_S)
    if isinstance(error, TooMany):
        return Refusal("UNAVAILABLE", 14, 429, message, 1.0)
    if isinstance(error, NotAuthenticated):
        return Refusal("UNAUTHENTICATED", 16, 401, message)
    if isinstance(error, NotAllowed):
        return Refusal("PERMISSION_DENIED", 7, 403, message)
    if isinstance(error, TooLarge):
        return Refusal("RESOURCE_EXHAUSTED", 8, 413, message)
    if isinstance(error, BadInput):
        return Refusal("INVALID_ARGUMENT", 3, 400, message)
    if isinstance(error, StallscopeError):
        return Refusal("INTERNAL", 13, 500, message)
    return Refusal("INTERNAL", 13, 500, _INTERNAL)


def status(answer: Refusal) -> Any:
    """The google.rpc.Status of a refusal."""
    from google.protobuf.any_pb2 import Any as Detail
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import BadRequest, RetryInfo
    from google.rpc.status_pb2 import Status

    details = []
    if answer.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(answer.retry_after_s * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    elif answer.http in (400, 413):
        details.append(BadRequest(field_violations=[BadRequest.FieldViolation(description=answer.message)]))
    out = Status(code=answer.code, message=answer.message)
    for detail in details:
        packed = Detail()
        packed.Pack(detail)
        out.details.append(packed)
    return out


def retry_after_header(output: Refusal) -> str | None:
    """Whole seconds, at least one, for HTTP's Retry-After."""
    return None if output.retry_after_s is None else str(max(1, math.ceil(output.retry_after_s)))
