"""The cost report as text, CSV and a self-contained HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLUMNS = (
    "by",
    "group",
    "n_incidents",
    "gpu_seconds",
    "at_most_gpu_seconds",
    "usd",
    "at_most_usd",
    "usd_per_hour",
)

_STYLE = """
:root { color-scheme: light dark; --bar: #2f6fab; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
h1, h2, li, td:first-child, td.text { overflow-wrap: anywhere; } h2 { font-size: 1.1rem; } .chart { width: 100%; }
th:last-child { text-align: left; }
@media (max-width: 40rem) { table { font-size: 14px; } td.bar, th.bar { display: none; } }
td.bar { width: 30%; } td.bar svg { display: block; width: 100%; height: 1rem; }
@media print { body { margin: 0; } }
"""


def rows_of(answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of COLUMNS. answers: of the tool get_cost, by grouping."""
    return [
        {"by": by, "group": _group(by, row), **{name: row[name] for name in COLUMNS[2:]}}
        for by, answer in answers.items()
        for row in answer["rows"]
    ]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """With a header; an unknown value is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_text(answers: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """A table for each grouping."""
    parts = [title, next(iter(answers.values()))["summary"]]
    for by, answer in answers.items():
        lines = [f"{'by ' + by:32}{'incidents':>10}{'GPU seconds':>22}{'cost':>20}"]
        for row in answer["rows"]:
            group, seconds = _group(by, row), _range(row, "gpu_seconds", "{:,.0f}")
            lines.append(
                f"{group[:31]:32}{row['n_incidents']:>10,}{seconds:>22}{_range(row, 'usd', '${:,.2f}'):>20}"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def as_html(answers: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """A page without external requests, for e-mail and cron."""
    tables = "".join(_table(by, answer) for by, answer in answers.items())
    summary = escape(next(iter(answers.values()))["summary"])
    return page(title, f"<p>{summary}</p>{tables}")


def page(title: str, content: str) -> str:
    """A whole page. title: text; content: HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{content}</main></body></html>\n"
    )


def _table(by: str, answer: Mapping[str, Any]) -> str:
    largest = max((row["gpu_seconds"] for row in answer["rows"]), default=0.0) or 1.0
    heads = (
        "".join(f'<th scope="col">{name}</th>' for name in (by, "incidents", "GPU seconds", "cost"))
        + '<th scope="col" class="bar">share</th>'
    )
    body = "".join(
        f"<tr><td>{escape(_group(by, row))}</td><td>{row['n_incidents']:,}</td>"
        f"<td>{_range(row, 'gpu_seconds', '{:,.0f}')}</td><td>{_range(row, 'usd', '${:,.2f}')}</td>"
        f'<td class="bar">{_bar(row["gpu_seconds"] / largest)}</td></tr>'
        for row in answer["rows"]
    )
    caption = escape(f"By {by}")
    return f"<h2>{caption}</h2><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _bar(share: float) -> str:
    label = f"{share:.0%} of the largest"
    return (
        f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<rect width="{share * 100:.2f}" height="10" fill="var(--bar)"/></svg>'
    )


def _group(by: str, row: Mapping[str, Any]) -> str:
    """The value that the row stands for, in words."""
    if by == "rank":
        rank = "no rank named" if row["rank"] is None else f"rank {row['rank']}"
        return ", ".join(filter(None, (rank, row["node"], row["cluster"])))
    return str((row[by] if by in row else row["owner"]) or "unknown")


def _range(row: Mapping[str, Any], name: str, form: str) -> str:
    low, high = row[name], row[f"at_most_{name}"]
    if low is None:
        return "no price"
    return form.format(low) if high is None else f"{form.format(low)} to {form.format(high)}"
