"""A query's rows as JSON: bounded in rows and bytes, with values that every JSON parser reads."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from stallscope.errors import OverLimits

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and line ends, and characters that change the writing direction."""


def clean(text: str) -> str:
    """Text of a traced process without characters that control a terminal or hide other text."""
    return _CONTROL.sub("", text)


def rows_within(
    chunks: Iterable[Sequence[tuple[Any, ...]]], *, max_rows: int, max_bytes: int
) -> tuple[list[list[Any]], bool]:
    """The first rows that fit into both limits, and whether there were more.

    Raises OverLimits where even the first row does not fit.
    """
    rows: list[list[Any]] = []
    n_bytes = 0
    for row in (row for chunk in chunks for row in chunk):
        if len(rows) == max_rows:
            return rows, True
        values = [plain(value) for value in row]
        n_bytes += len(json.dumps(values))
        if n_bytes > max_bytes:
            if not rows:
                raise OverLimits(
                    f"one row is larger than {max_bytes:,} bytes; select fewer or shorter columns"
                )
            return rows, True
        rows.append(values)
    return rows, False


def plain(value: Any) -> Any:
    """The value for JSON: times in ISO 8601 (UTC where they have a zone), no NaN, bytes as hex digits."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    return _nested(value)


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {clean(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return clean(str(value))


def _moment(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat()
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
