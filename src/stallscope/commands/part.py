"""Options that select a part of a trace, and the parsing of their values."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import duration_ns
from stallscope.errors import BadInput

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.store.time_range import Part

Since = Annotated[str | None, typer.Option(help="Only the last part of the trace: 30s, 5m, 2h.")]
From = Annotated[
    str | None, typer.Option("--from", help="Start time, UTC: 2026-11-28T14:03:20, or 14:03 today.")
]
To = Annotated[str | None, typer.Option("--to", help="End time, UTC.")]
Step = Annotated[
    str | None, typer.Option("--step", help="Only these steps, as reported by the job: 100..200, 100.., 7.")
]
Phase = Annotated[str | None, typer.Option("--phase", help="Only this phase, as reported by the job.")]
Last = Annotated[
    str | None, typer.Option("--last", help="Only the last N rounds, or the last part as --since: 30s, 5m.")
]

_MAX_DIGITS = 18
"""A number of rounds or steps fits in 64 bits."""


def part_from(
    since: str | None,
    begin: str | None,
    end: str | None,
    *,
    step: str | None,
    phase: str | None,
    last: str | None = None,
) -> Part:
    """The part that the options select; all given options apply. Raises BadInput."""
    from stallscope.store.time_range import Part

    n_rounds, last_ns = (None, None) if last is None else last_part(last)
    if last_ns is not None and since is not None:
        raise BadInput(f"--last {last} and --since {since} both select a duration; give only one")
    begin_ns = None if begin is None else wall_ns(begin, "--from")
    end_ns = None if end is None else wall_ns(end, "--to")
    if begin_ns is not None and end_ns is not None and end_ns < begin_ns:
        raise BadInput(f"--to {end} is before --from {begin}; give the earlier time as --from")
    return Part(
        since_ns=last_ns if since is None else duration_ns(since, "--since"),
        from_wall_ns=begin_ns,
        to_wall_ns=end_ns,
        steps=None if step is None else step_range(step),
        phase=phase,
        last_rounds=n_rounds,
    )


def check_no_part(file: Path, given: Mapping[str, object]) -> None:
    """Raises BadInput for an option that selects a part of a node trace, where the file is of another kind."""
    for option, value in given.items():
        if value is not None:
            raise BadInput(
                f"{option} needs a node trace, and {file} is of another kind: "
                f"first run `stallscope import {file} --db OUT.db`, or omit {option}"
            )


def only_since(part: Part) -> int | None:
    """The duration of a part selected by --since alone. Raises BadInput for any other option: nodes lack them."""
    from stallscope.store.time_range import Part

    if part != Part(since_ns=part.since_ns):
        raise BadInput(
            "several nodes support only --since; for other options `stallscope merge` their traces first"
        )
    return part.since_ns


def wall_ns(text: str, option: str) -> int:
    """ns since 1970 of a time: ISO 8601, UTC if it has no zone, or HH:MM[:SS] of today (UTC)."""
    time_text = text.strip()
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?", time_text):
        time_text = f"{time.strftime('%Y-%m-%d', time.gmtime())}T{time_text.zfill(5)}"
    try:
        moment = datetime.fromisoformat(time_text)
    except ValueError:
        raise BadInput(
            f"{option}: {text!r} is not a time; give for example 2026-11-28T14:03:20 or 14:03"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since_1970 = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_1970.days * 86_400 + since_1970.seconds) * 10**9 + since_1970.microseconds * 1000


def last_part(text: str) -> tuple[int | None, int | None]:
    """The number of rounds of "30", or the ns of "30s"; the other is None. Raises BadInput."""
    from stallscope.settings import duration_s

    count = text.strip().replace(",", "").replace("_", "")
    if re.fullmatch(r"0*[1-9]\d*", count, re.ASCII):
        if len(count.lstrip("0")) > _MAX_DIGITS:
            raise BadInput(f"--last: {text[:80]!r} is too large; omit --last for the whole trace")
        return int(count), None
    try:
        if re.fullmatch(r"[-+.\d\s]*", text):
            raise ValueError
        duration_s(text)
    except ValueError:
        raise BadInput(
            f"--last: {text[:80]!r} is neither a number of rounds nor a duration; give for example 100 or 5m"
        ) from None
    return None, duration_ns(text, "--last")


def step_range(text: str) -> tuple[int, int]:
    """First and last step of "100..200", "100..", "..200" and "7"."""
    match = re.fullmatch(r"(\d*)\.\.(\d*)|(\d+)", text.strip(), re.ASCII)
    if not match or text.strip() == "..":
        raise BadInput(
            f"--step: {text[:80]!r} is not a range of steps; give for example 100..200, 100.. or 7"
        )
    if any(len((number or "").lstrip("0")) > _MAX_DIGITS for number in match.groups()):
        raise BadInput(f"--step: {text[:80]!r} is too large; give for example 100..200, 100.. or 7")
    if match[3]:
        return int(match[3]), int(match[3])
    low, high = int(match[1] or 0), int(match[2] or 1 << 62)
    if low > high:
        raise BadInput(f"--step: {text!r} ends before it begins; give the smaller step first")
    return low, high
