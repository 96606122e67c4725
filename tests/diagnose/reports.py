"""Reports for tests: made, checked against the JSON Schema, and printed as text, every time."""

import json
from importlib.resources import files
from typing import Any

import jsonschema

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict, as_json
from stallscope.events.trace import Trace

SCHEMA: dict[str, Any] = json.loads(
    files("stallscope.diagnose").joinpath("report.schema.json").read_text(encoding="utf-8")
)
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def report_of(trace: Trace, **rest: Any) -> Report:
    """The report on a trace, after checks that hold for every report."""
    report = diagnose(trace, **rest)
    as_data = json.loads(json.dumps(as_json(report), allow_nan=False))
    _VALIDATOR.validate(as_data)
    words = text.report(report)
    assert all(verdict.summary and verdict.summary in words for verdict in report.verdicts)
    assert ("Healthy" in words) == report.healthy == as_data["healthy"]
    assert report.healthy <= (not report.verdicts)
    assert as_data["answer"] == report.answer
    assert "Time budget" in words
    for verdict in report.verdicts:
        assert len(set(verdict.ranks)) == len(verdict.ranks)
        assert not set(verdict.ranks) & set(verdict.victims)
        assert sum(part.share for part in verdict.causes) <= 1 + 1e-9
        shares = [part.share for part in verdict.causes]
        assert shares == sorted(shares, reverse=True)
    return report


def only(report: Report) -> Verdict:
    """The only verdict of a report."""
    assert len(report.verdicts) == 1, [verdict.summary for verdict in report.verdicts]
    return report.verdicts[0]


def blamed(report: Report) -> list[tuple[Any, ...]]:
    """The parts of a report that stay equal for an equal job: kinds, ranks, periods and first causes."""
    return sorted(
        (
            verdict.kind,
            tuple(verdict.ranks),
            verdict.period_steps or 0,
            verdict.causes[0].cause.name if verdict.causes else "",
        )
        for verdict in report.verdicts
    )
