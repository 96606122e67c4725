"""Wall-clock times as text."""

from datetime import UTC, datetime


def iso_utc(wall_ns: int) -> str:
    """ISO 8601 in UTC with milliseconds, e.g. 2026-11-27T21:32:16.223Z."""
    moment = datetime.fromtimestamp(wall_ns // 1_000_000 / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
