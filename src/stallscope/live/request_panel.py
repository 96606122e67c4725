"""Draws the requests to inference engines: a table of endpoints, and a line for each process with open requests."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stallscope.diagnose.views import Endpoint
from stallscope.events.counted import counted
from stallscope.live.request_lines import OpenLine

_WIDE, _WIDER = 80, 110
_LATE_S = 1.0


def request_panel(
    lines: Sequence[Endpoint], waiting: Sequence[OpenLine], *, width: int, room: int
) -> list[RenderableType]:
    """The panel in `room` lines: open requests first, because the oldest may be stuck."""
    if not lines and not waiting:
        return [Text("no requests to an inference engine in the last minute", style="dim")]
    shown = [_open_text(line) for line in waiting[: max(min(len(waiting), room // 3), 1)]]
    room -= len(shown) + 1
    return [*shown, Text(), _endpoints(lines[: max(room - 1, 1)], width)]


def _open_text(line: OpenLine) -> Text:
    name = " ".join(part for part in (line.engine, line.model) if part)
    text = f"{name} {line.pid}: {counted(line.n_open, 'request')} open"
    if line.n_full:
        text += f", {line.n_full} with a client that does not read"
    if line.oldest_s is not None:
        text += f"; the oldest, {line.oldest_path}, is {line.oldest_s:g} s old"
        text += f" and {line.awaits} since {line.still_s:g} s"
    is_still = (line.still_s or 0.0) >= _LATE_S
    out = Text(text, style="bold yellow" if is_still else "")
    out.no_wrap, out.overflow = True, "ellipsis"
    return out


def _endpoints(lines: Sequence[Endpoint], width: int) -> Table:
    """Times in ms. A narrow terminal has fewer percentiles."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("endpoint", no_wrap=True, overflow="ellipsis")
    times = [("first token", "first_ms"), ("between", "between_ms"), ("whole", "whole_ms")]
    percents: tuple[str, ...] = ("p50", "p99") if width < _WIDER else ("p50", "p90", "p99", "p99.9")
    if width < _WIDE:
        times, percents = times[:2], ("p99",)
    columns = [(title, name, percent) for title, name in times for percent in percents]
    for title in ("per s", *(f"{title} {percent}" for title, _, percent in columns)):
        table.add_column(title, justify="right")
    for line in lines:
        name = " ".join(part for part in (line.model or line.engine, line.path) if part)
        values = [getattr(line, name).get(percent) for _, name, percent in columns]
        table.add_row(
            name, f"{line.per_second:,.1f}", *("" if value is None else f"{value:,.0f}" for value in values)
        )
    return table
