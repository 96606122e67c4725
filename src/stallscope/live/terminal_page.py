"""Draws the page of a running trace: whole lines, at any width and height. The verdict is always on the page."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stallscope.diagnose.views import Endpoint
from stallscope.events.counted import counted
from stallscope.events.names import CATEGORY_NAMES
from stallscope.live.job_totals import OpLine, RankLine
from stallscope.live.page_view import HELP, Panel, View, ordered
from stallscope.live.request_lines import OpenLine
from stallscope.live.request_panel import request_panel

_WIDE, _WIDER = 80, 110
_MIN_RANKS = 4
_LOW = 12  # a terminal with fewer lines shows neither the machine nor a second line of a verdict
_WITH_KEYS = 20  # a terminal with fewer lines has the keys in the title
_LAST_RANKS = 44  # lines of each job on the last screen
_MAX_VERDICTS = 3
_MARKS = {
    "on_cpu": ("#", "green"),
    "wait_gpu": (".", "blue"),
    "device": (":", "cyan"),
    "preempted": ("P", "bold red"),
    "stopped": ("S", "bold red"),
    "io": ("I", "bold magenta"),
    "lock": ("L", "bold yellow"),
    "sleep": ("z", "yellow"),
    "net": ("N", "magenta"),
    "child": ("D", "magenta"),
    "fault": ("F", "red"),
    "driver": ("V", "cyan"),
    "launch": ("U", "cyan"),
    "copy": ("C", "bold cyan"),
    "alloc": ("A", "bold cyan"),
    "other_off": ("o", "yellow"),
}
"""A letter for each category, so that the bar is readable without colour."""

_HEAT = ((1.0, ".", "dim"), (3.0, "-", "green"), (10.0, "=", "yellow"), (50.0, "+", "bold yellow"))
_HOTTEST = ("#", "bold red")
"""Marks of the heat strip: lateness below this number of milliseconds, its letter and style; beyond: the hottest."""

_WORST = "bold yellow"
_MIN_LATE_MS = 1.0


@dataclass(frozen=True)
class VerdictLine:
    """One incident. time: time of day, UTC, at which it opened. severity: empty if unknown. pids: late processes."""

    time: str
    is_over: bool
    summary: str
    severity: str = ""
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Page:
    """Contents of the page. title, job, system: one line each. host_lines, notes: newest last. report: of explain."""

    title: str
    job: str
    system: str
    ranks: Sequence[RankLine]
    operations: Sequence[OpLine]
    host_lines: Sequence[str] = ()
    verdicts: Sequence[VerdictLine] = ()
    n_lost: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    report: str = ""
    endpoints: Sequence[Endpoint] = ()
    open_requests: Sequence[OpenLine] = ()


def shown_ranks(page: Page, view: View) -> list[RankLine]:
    """The ranks of the selected job in the order of the view; processes without rounds only if the job has no ranks."""
    members = [line for line in page.ranks if line.n_rounds and line.job in (view.job, -1)]
    return ordered(members or [line for line in page.ranks if not line.n_rounds], view.order)


def n_jobs(page: Page) -> int:
    """The number of jobs with rounds."""
    return max((line.job for line in page.ranks if line.n_rounds), default=-1) + 1


def drawn(page: Page, width: int, height: int, view: View | None = None) -> Group:
    """The page for a terminal of this size: head, verdicts, then the panel, which is cut to the remaining lines.

    view: None for the last screen, which takes no keys.
    """
    if view is None:
        return Group(*_head(page, view, height), *_all_verdicts(page, width), *_all_jobs(page, width))
    top = [*_head(page, view, height), *_verdicts(page, view, width, height)]
    has_keys = height >= _WITH_KEYS
    panel = _panel(page, view, width, height - len(top) - 1 - has_keys)
    return Group(*top, *([_keys(view)] if has_keys else []), *panel)


def _keys(view: View) -> Text:
    """The keys that have an effect in this panel."""
    if view.panel is Panel.RANKS:
        order = f"s sort: {view.order}"
        words = ["q end", "? help", order, "space pause", "enter ledger", "e explain"]
    else:
        scroll = {Panel.EXPLAIN: "up/down scroll", Panel.LEDGER: "up/down other rank"}.get(view.panel)
        words = ["q end", "esc back", *([scroll] if scroll else [])]
    return _cut(Text("  ".join(words), style="dim"))


def _all_verdicts(page: Page, width: int) -> list[Text]:
    """Every verdict of the last screen, in full."""
    texts = [(_verdict_text(line), line.is_over) for line in _newest_first(page)]
    parts = [(part, is_over) for text, is_over in texts for part in _folded(text, width)]
    return [Text(part, style="dim" if is_over else "bold yellow") for part, is_over in parts] or _no_verdict()


def _all_jobs(page: Page, width: int) -> list[RenderableType]:
    """The ranks of each job, and the events."""
    parts: list[RenderableType] = []
    for number in range(max(n_jobs(page), 1)):
        ranks = shown_ranks(page, View(job=number))
        title = f"job {number + 1}: {counted(len(ranks), 'rank')}"
        parts += [Text(), *([Text(title, style="bold")] if n_jobs(page) > 1 else [])]
        helpers = [line for line in page.ranks if not line.n_rounds] if number == 0 else []
        rest = replace(page, ranks=[*ranks, *helpers], host_lines=(), notes=(), operations=())
        parts += _overview(rest, ranks, View(job=number), width=width, room=_LAST_RANKS)[1:]
    if page.operations:
        parts += [Text(), _operations(page.operations, width)]
    return [*parts, *(_cut(Text(line)) for line in page.host_lines), *_notes(page, 2)]


def _head(page: Page, view: View | None, height: int) -> list[Text]:
    keys = "  ? help  q end" if view is not None and height < _WITH_KEYS else ""
    keys = "  paused, space continues" if view is not None and view.is_paused else keys
    lines = [
        _cut(Text.assemble((page.title, "bold"), (keys, "dim"))),
        _cut(Text.assemble(page.job, "; ", _losses(page))),
    ]
    if view is not None and n_jobs(page) > 1:
        tabs = [
            (f" {number + 1}: {counted(sum(line.job == number for line in page.ranks), 'rank')} ", style)
            for number in range(n_jobs(page))
            for style in ["reverse" if number == view.job else "dim"]
        ]
        lines.append(_cut(Text.assemble("jobs ", *tabs, ("  tab: next", "dim"))))
    return [*lines, _cut(Text(page.system, style="dim"))] if height >= _LOW else lines


def _verdicts(page: Page, view: View, width: int, height: int) -> list[Text]:
    """The open verdicts first, of them the verdicts on the selected job, the newest on top.

    The first gets two lines if it is too long for the terminal.
    """
    of_job = {line.pid for line in page.ranks if line.job == view.job}
    newest = sorted(_newest_first(page), key=lambda line: (line.is_over, of_job.isdisjoint(line.pids)))
    most = _MAX_VERDICTS if height >= 20 else 1
    lines: list[Text] = []
    for number, line in enumerate(newest[:most]):
        words = Text(_verdict_text(line), style="dim" if line.is_over else "bold yellow")
        if number == 0 and height >= _LOW:
            lines += list(_wrapped(words, width, 2))
        else:
            lines.append(_cut(words))
    return lines or _no_verdict()


def _no_verdict() -> list[Text]:
    return [Text("no verdict yet", style="dim")]


def _newest_first(page: Page) -> list[VerdictLine]:
    """The open verdicts, then the closed verdicts."""
    newest = [*reversed(page.verdicts)]
    return sorted(newest, key=lambda line: line.is_over)


def _verdict_text(line: VerdictLine) -> str:
    return f"{line.time} {line.severity + ' ' if line.severity else ''}{line.summary}"


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    """The text in at most this number of lines, the last cut."""
    if len(text) <= width:
        return [text]
    space = text.plain.rfind(" ", 0, width)
    end = space if space > 0 else width
    rest = text[end:]
    rest = Text("  " + rest.plain.strip(), style=text.style)
    return [text[:end], _cut(rest)] if most == 2 else [_cut(text)]


def _panel(page: Page, view: View, width: int, room: int) -> list[RenderableType]:
    if view.panel is Panel.HELP:
        lines = [_cut(Text(f"{keys:<10}  {meaning}")) for keys, meaning in HELP]
        return [Text(), *[*lines, Text(), *_letters(width)][: max(room - 1, 1)]]
    if view.panel is Panel.EXPLAIN:
        report = (page.report or "computing the report").splitlines()
        lines = [Text(part) for line in report for part in _folded(line, width)]
        top = min(view.top, max(len(lines) - 1, 0))
        return [Text(), *lines[top : top + max(room - 1, 1)]]
    ranks = shown_ranks(page, view)
    has_requests = bool(page.endpoints or page.open_requests)
    is_serving = has_requests and not any(line.n_rounds for line in ranks)
    if view.panel is Panel.REQUESTS or (view.panel is Panel.RANKS and is_serving):
        return [
            Text(),
            *request_panel(page.endpoints, page.open_requests, width=width, room=max(room - 1, 3)),
        ]
    if view.panel is Panel.LEDGER and ranks:
        line = next((line for line in ranks if line.pid == view.selected), ranks[0])
        return [Text(), *_ledger(line, width)[: max(room - 1, 1)]]
    return _overview(page, ranks, view, width=width, room=room)


def _folded(line: str, width: int) -> list[str]:
    """The line in parts that fit, the further parts indented."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent) or [""]


def _overview(
    page: Page, ranks: list[RankLine], view: View, *, width: int, room: int
) -> list[RenderableType]:
    """Ranks first. Operations, events and notes get the remaining lines, in this order."""
    if not ranks:
        return [Text(), Text("no job yet", style="dim"), *_notes(page, 2)]
    n_helpers = sum(not line.n_rounds for line in page.ranks) if ranks[0].n_rounds else 0
    parts: list[RenderableType] = [Text()]
    events = [_cut(Text(line)) for line in page.host_lines]
    # A narrow table has no room for the legend in its header.
    legend = [_cut(_legend(ranks, width))] if width < _WIDER and room >= _LOW else []
    n_below = bool(n_helpers) + len(legend)
    n_needed = len(ranks) + 1 + n_below
    n_others = len(events) + (len(page.operations) + 2 if page.operations else 0) + min(len(page.notes), 2)
    n_ranks = max(min(n_needed, room - 1), min(_MIN_RANKS, room - 1)) if n_needed + n_others <= room else None
    if n_ranks is None:
        n_ranks = max(min(n_needed, room - 1 - min(len(events), 2)), min(_MIN_RANKS, room - 1))
    parts.append(_ranks(ranks, view, width=width, room=max(n_ranks - n_below, 2)))
    parts += legend
    if n_helpers:
        parts.append(
            _cut(
                Text(
                    f"and {counted(n_helpers, 'helper process', 'helper processes')} without collectives",
                    style="dim",
                )
            )
        )
    left = room - 1 - n_ranks
    shown_events = events[: max(left, 0)]
    left -= len(shown_events)
    if page.operations and left >= len(page.operations) + 2:
        parts += [Text(), _operations(page.operations, width)]
        left -= len(page.operations) + 2
    return [*parts, *shown_events, *_notes(page, max(left, 0))]


def _notes(page: Page, most: int) -> list[Text]:
    return [_cut(Text(line, style="dim")) for line in page.notes[-min(most, 2) :]] if most else []


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def bar(shares: Sequence[float], width: int = 24) -> Text:
    """The shares of a time ledger as letters, the largest first; cells are proportional to the shares."""
    out = Text()
    if sum(shares) <= 0:
        return Text("-" * width, style="dim")
    reached = 0.0
    order = sorted(range(len(shares)), key=lambda i: -shares[i])
    for i in order:
        mark, style = _MARKS[CATEGORY_NAMES[i]]
        begin, reached = round(reached * width), reached + shares[i]
        out.append(mark * (round(reached * width) - begin), style)
    return out


def heat(lateness_ms: Sequence[float | None], width: int) -> Text:
    """The last seconds of a rank, a letter for each, newest last: the largest lateness of the second."""
    out = Text()
    for value in [None, *lateness_ms][-width:] if width < len(lateness_ms) else lateness_ms:
        if value is None:
            out.append(" ")
            continue
        out.append(*next(((mark, style) for limit, mark, style in _HEAT if value < limit), _HOTTEST))
    return out


def _ranks(lines: list[RankLine], view: View, *, width: int, room: int) -> Table:
    """The table of ranks with its header in `room` lines."""
    worst = max((line.worst_ms or 0.0 for line in lines), default=0.0)
    shown = _visible(lines, view, room - 1)
    has_host = width >= _WIDER and len({line.node for line in lines}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    is_wide = width >= _WIDE
    for name in ("rank", "process", *(("rounds",) if width >= _WIDER else ()), "late", "worst"):
        table.add_column(name, justify="left" if name == "process" else "right", no_wrap=True)
    bar_width = 24 if width >= _WIDER else 12 if is_wide else 8
    heat_width = max(min(width - 62 - bar_width - 22 * has_host - (10 if width >= _WIDER else 0) + 15, 60), 0)
    table.add_column(_legend(lines, bar_width), no_wrap=True)
    if is_wide:
        table.add_column(f"last {heat_width} s", no_wrap=True, width=heat_width)
    for line in shown:
        is_worst = line.worst_ms is not None and line.worst_ms == worst and worst >= _MIN_LATE_MS
        name = f"{line.comm} {line.pid}" if line.is_alive else f"{line.comm} {line.pid} ended"
        table.add_row(
            "?" if line.rank < 0 else str(line.rank),
            Text(f"{line.node} {name}" if has_host else name, overflow="ellipsis", no_wrap=True),
            *([f"{line.n_rounds:,}"] if width >= _WIDER else []),
            _late(line.late_ms),
            Text(_late(line.worst_ms), style=_WORST if is_worst else ""),
            bar(line.shares, bar_width),
            *([heat(line.heat_ms, heat_width)] if is_wide else []),
            style="reverse" if line.pid == view.selected else "",
        )
    if len(shown) < len(lines):
        table.add_row("", Text(f"and {len(lines) - len(shown)} more", style="dim"))
    return table


def _visible(lines: list[RankLine], view: View, room: int) -> list[RankLine]:
    """The first lines that fit, or the lines around the selected rank; a line is kept for the count of the others."""
    if len(lines) <= room:
        return lines
    n = max(room - 1, 1)
    at = next((i for i, line in enumerate(lines) if line.pid == view.selected), 0)
    begin = max(at - n + 1, 0)
    return lines[begin : begin + n]


def _ledger(line: RankLine, width: int) -> list[Text]:
    """The time ledger of one rank in the last ten seconds, a bar for each category."""
    title = (
        f"rank {line.rank if line.rank >= 0 else '?'}, {line.comm} {line.pid}: time ledger of the last 10 s"
    )
    out = [_cut(Text(title, style="bold"))]
    order = sorted(range(len(line.shares)), key=lambda i: -line.shares[i])
    for i in (i for i in order if line.shares[i] >= 0.001):
        name, (_, style) = CATEGORY_NAMES[i], _MARKS[CATEGORY_NAMES[i]]
        cells = round(line.shares[i] * max(width - 24, 4))
        out.append(_cut(Text.assemble(f"{name:<10} {100 * line.shares[i]:5.1f} %  ", ("#" * cells, style))))
    return out if len(out) > 1 else [*out, Text("not yet known", style="dim")]


def _late(value_ms: float | None) -> str:
    """Lateness; empty if unknown, 0 for a rank that arrives before the median."""
    return "" if value_ms is None else f"{max(value_ms, 0.0):,.1f} ms"


def _legend(lines: Sequence[RankLine], width: int) -> Text:
    """The meaning of the letters in use, the largest share first; the help page explains all letters."""
    total = [sum(line.shares[i] for line in lines) for i in range(len(CATEGORY_NAMES))]
    present = sorted((i for i, share in enumerate(total) if share >= 0.02), key=lambda i: -total[i])
    words = [f"{_MARKS[CATEGORY_NAMES[i]][0]} {CATEGORY_NAMES[i]}" for i in present[: width // 7]]
    return Text(" ".join(words) if words else "time", style="dim")


def _letters(width: int) -> list[Text]:
    """The meaning of every letter of the bars and of the heat strip."""
    limits = [f"{mark} below {limit:g} ms" for limit, mark, _ in _HEAT]
    texts = (
        "time: " + "  ".join(f"{mark} {name}" for name, (mark, _) in _MARKS.items()),
        "lateness by second: " + "  ".join([*limits, f"{_HOTTEST[0]} more"]),
    )
    return [Text(part, style="dim") for line in texts for part in _folded(line, width)]


def _operations(lines: Sequence[OpLine], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("operation", no_wrap=True)
    names = ("calls", "p50", "p95", "p99", "first") if width >= _WIDE else ("calls", "p50", "p99")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        title = f"{line.name} (from 1 ms on)" if line.only_slow and len(line.timed_ms) else line.name
        cells = {
            "calls": f"{line.n_calls:,}" if line.n_calls else "",
            "p50": _ms(line.quantile_ms(0.5)),
            "p95": _ms(line.quantile_ms(0.95)),
            "p99": _ms(line.quantile_ms(0.99)),
            "first": _ms(line.first_ms),
        }
        table.add_row(Text(title), *(cells[name] for name in names))
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f} ms" if value < 1000 else f"{value / 1000:,.2f} s"


def _losses(page: Page) -> Text:
    if not page.n_lost:
        return Text("no records lost")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in sorted(page.lost.items()))
    return Text(f"{page.n_lost:,} records lost ({kinds}): verdicts are less certain", style="bold red")
