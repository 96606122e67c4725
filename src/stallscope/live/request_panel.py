"""Draws the requests to inference engines: a table of endpoints, and a line for each process with open requests."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stallscope.diagnose.views import Endpoint
from stallscope.events.counted import counted
from stallscope.live.request_lines import OpenLine

_WIDE, _WIDER = 80, 110
_GAP = 2
_MIN_NAME = 16
_LATE_S = 1.0


def request_panel(
    lines: Sequence[Endpoint], waiting: Sequence[OpenLine], *, width: int, room: int
) -> list[RenderableType]:
    """The panel in `room` lines: open requests first, because the oldest may be stuck."""
    if not lines and not waiting:
        return [Text("no requests to an inference engine in the last minute", style="dim")]
    shown = [_open_text(line) for line in waiting[: max(min(len(waiting), room // 3), 1)]]
    room -= len(shown) + 1
    return [*shown, Text(), _endpoints(lines, width, room)]


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


def _endpoints(lines: Sequence[Endpoint], width: int, room: int) -> Table:
    """The table in `room` lines, times in ms. A narrow terminal has fewer percentiles, and titles of several lines."""
    times = [("first token", "first_ms"), ("between", "between_ms"), ("whole", "whole_ms")]
    percents: tuple[str, ...] = ("p50", "p99") if width < _WIDER else ("p50", "p99", "p99.9")
    if width < _WIDE:
        times, percents = times[:2], ("p99",)
    columns = [(title, name, percent) for title, name in times for percent in percents]
    titles = ["per s", *(f"{title} {percent}" for title, _, percent in columns)]
    rows = [(_name(line), _values(line, columns)) for line in lines]
    longest_name = max((len(name) for name, _ in rows), default=0)
    if longest_name + sum(_GAP + len(title) for title in titles) > width:
        titles = [title.replace(" ", "\n") for title in titles]
    rows = rows[: max(room - 1 - max(title.count("\n") for title in titles), 1)]
    taken = sum(
        _GAP + max(map(len, [*title.split("\n"), *(values[number] for _, values in rows)]))
        for number, title in enumerate(titles)
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    table.add_column("endpoint", no_wrap=True, overflow="ellipsis", max_width=max(width - taken, _MIN_NAME))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for name, values in rows:
        table.add_row(name, *values)
    return table


def _name(line: Endpoint) -> str:
    return " ".join(part for part in (line.model or line.engine, line.path) if part)


def _values(line: Endpoint, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    times = (getattr(line, name).get(percent) for _, name, percent in columns)
    return [f"{line.per_second:,.1f}", *("" if value is None else f"{value:,.0f}" for value in times)]
