"""The goodput report as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from stallscope.events.goodput_parts import PARTS

_COLUMNS = ("day", "group", "n_jobs", "gpu_hours", "goodput", *PARTS, "n_unknown_costs")


def _as_text(answer: Mapping[str, Any]) -> str:
    """GPU hours, by group; `unknown` counts verdicts without a known cost."""
    heads = "".join(f"{name:>11}" for name in PARTS)
    lines = [
        answer["summary"],
        "",
        f"{'day':12}{'group':28}{'GPU hours':>11}{'goodput':>9}{heads}{'unknown':>9}",
    ]
    for row in answer["rows"]:
        share = "unknown" if row["goodput"] is None else f"{row['goodput']:.1%}"
        hours = "".join(f"{row[name]:>11,.2f}" for name in PARTS)
        group = (row["group"] or "unknown")[:27]
        lines.append(
            f"{row['day'] or '':12}{group:28}{row['gpu_hours']:>11,.2f}{share:>9}{hours}{row['n_unknown_costs']:>9}"
        )
    return "\n".join(lines) + "\n"


def _as_csv(answer: Mapping[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(answer["rows"])
    return out.getvalue()


def _as_json(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, indent=1) + "\n"


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "text": _as_text,
    "csv": _as_csv,
    "json": _as_json,
}
