"""OTLP's AnyValue as Python values."""

import base64
from collections.abc import Iterable
from typing import Any

MAX_NESTED = 16
"""Maximum nesting of lists: deeper lists are cut, so that no sender can exhaust the hub's stack."""


def any_value(value: Any, depth: int = 0) -> Any:
    """The Python value of an AnyValue message: bytes as base64 text, None if nothing is set."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if depth > MAX_NESTED:
        return "..."
    if kind == "array_value":
        return [any_value(inner, depth + 1) for inner in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: any_value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def as_dict(attributes: Iterable[Any]) -> dict[str, Any]:
    """KeyValue messages as a dict; of equal keys the last wins."""
    return {pair.key: any_value(pair.value) for pair in attributes}
