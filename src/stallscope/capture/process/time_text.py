"""Times of other programs, as text."""

from datetime import datetime


def wall_ns(text: str) -> int:
    """ns since 1970 of an RFC 3339 time, such as 2026-11-30T01:04:10Z; 0 for anything else."""
    try:
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()) * 10**9
    except ValueError:
        return 0
