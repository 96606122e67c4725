"""The post-mortem of one job as a self-contained HTML page: nothing is requested from another server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from stallscope.commands.cost_page import page
from stallscope.commands.job_report import Report, clock, facts, incident_lines
from stallscope.events.counted import counted

_WIDTH, _ROW = 1000, 24


def as_html(report: Report) -> str:
    """The page. report: see job_report.py."""
    parts = [
        f"<p><strong>{escape(report['answer'])}</strong>. {escape(report['summary'])}</p>",
        _list([f"{name}: {value}" for name, value in facts(report) if value]),
        _timeline(report["timeline"]),
        _chart(report["incidents"]),
        *(_incident(number, each) for number, each in enumerate(report["incidents"], 1)),
    ]
    if report["n_incidents_left_out"]:
        parts.append(f"<p>{counted(report['n_incidents_left_out'], 'smaller incident')} left out.</p>")
    if report["changes"]:
        items = "".join(f"<li>{escape(each['change'])}</li>" for each in report["changes"])
        parts.append(f"<h2>Changes to make</h2><ol>{items}</ol>")
    return page(f"Job {report['job']}", "".join(parts))


def _timeline(moments: Sequence[Mapping[str, Any]]) -> str:
    if not moments:
        return ""
    rows = "".join(
        f"<tr><td>{escape(clock(each['at']))}</td><td class='text'>{escape(each['text'])}</td></tr>"
        for each in moments
    )
    head = '<tr><th scope="col">time</th><th scope="col" class="text">event</th></tr>'
    return f"<h2>Timeline</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _chart(incidents: Sequence[Report]) -> str:
    """A bar for each incident over the time of all incidents; the timeline table has the same times as text."""
    spans = [
        (number, _seconds(each["since"]), _seconds(each["until"]), str(each["summary"]))
        for number, each in enumerate(incidents, 1)
        if each["since"] and each["until"]
    ]
    if not spans:
        return ""
    begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
    scale = _WIDTH / max(end - begin, 1e-3)
    bars = "".join(
        f'<rect x="{(since - begin) * scale:.1f}" y="{row * _ROW + 4}" height="{_ROW - 8}" fill="var(--bar)" '
        f'width="{max((until - since) * scale, 2):.1f}"><title>Incident {number}: {escape(summary)}</title>'
        "</rect>"
        for row, (number, since, until, summary) in enumerate(spans)
    )
    label = f"{counted(len(spans), 'incident')} over {end - begin:,.1f} s, in the order of their cost"
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {len(spans) * _ROW}" role="img" aria-label="{label}">{bars}</svg>'
        f"<p>{label}.</p>"
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _incident(number: int, each: Report) -> str:
    heading = f"Incident {number}: {each['summary']}"
    return f"<section><h2>{escape(heading)}</h2>{_list(incident_lines(each))}</section>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
