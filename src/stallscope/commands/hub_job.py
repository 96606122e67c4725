"""A job of a hub in the form of `explain --json`, for gates and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput
from stallscope.events.goodput_parts import PARTS

if TYPE_CHECKING:
    from stallscope.serve.client import HubClient

MAX_VERDICTS = 500


def report_of_job(client: HubClient, job: str) -> dict[str, Any]:
    """The report on all data of a job, with its cost per hour at the hub's prices.

    Raises the hub's errors, NotFound for an unknown job, BadInput for a name of several jobs.
    """
    if not job:
        raise BadInput("the id of the job is empty; stallscope ask summary lists the jobs")
    answer = client.ask("fleet.cluster.verdicts", {"job": job, "limit": MAX_VERDICTS})
    about = only_job(answer["jobs"], job)
    evidence = about["evidence"] or {}
    seconds = _seconds(about)
    report = {
        "answer": about["answer"],
        "examined": {"n_ranks": about["n_ranks"], "seconds": seconds},
        "step_ms": evidence.get("step_ms"),
        "verdicts": [_verdict(row) for row in answer["rows"]],
        "gaps": [*about["reasons"], *_gaps(answer, about)],
        "evidence": evidence,
        "budget": {"shares": _shares(client, about) if seconds else {}},
    }
    cost = client.ask("fleet.cluster.get_cost", {"job": job, "limit": 1})
    return report | _usd_per_hour(cost, seconds, report["verdicts"])


def only_job(jobs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The job of a name. Raises BadInput for a name of several jobs, and for a job without times."""
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise BadInput(
            f"the hub has verdicts on {name!r}, but not its start and end; name a job from `ask summary`"
        )
    ids = ", ".join(f"{each['job']} ({each['cluster'] or 'no cluster'})" for each in jobs[:4])
    raise BadInput(f"{name!r} is the name of {len(jobs)} jobs; give the id of a single job: {ids}")


def _seconds(about: Mapping[str, Any]) -> float:
    """From the first to the last collective; 0 where a time is unknown."""
    begin, end = about["begin"], about["end"] or about["last_seen"]
    if not begin or not end:
        return 0.0
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds())


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that gates and comparisons use, nested as in `explain --json`."""
    has_cost = row["gpu_seconds"] is not None or row["at_most_gpu_seconds"] is not None
    cost = {name: row[name] for name in ("gpu_seconds", "at_most_gpu_seconds", "is_lower_bound")}
    return {
        "kind": row["kind"],
        "summary": row["summary"],
        "ranks": row["ranks"],
        "causes": [{"cause": row["cause"], "share": row["cause_share"]}] if row["cause"] else [],
        "cost": cost if has_cost else None,
        "late_ms": None if row["late_ms"] is None else {"median": row["late_ms"]},
        "abstained_because": row["abstained_because"],
    }


def _gaps(answer: Mapping[str, Any], about: Mapping[str, Any]) -> list[dict[str, str]]:
    """Why the hub's answer on the job is less certain than the job's own answer."""
    gaps = []
    if about["answer"] == "healthy" and answer["answer"] != "healthy":
        n_rows = answer["n_rows_not_examined"]
        reason = f"{n_rows:,} rows were not examined" if n_rows else "a part of the hub's data is damaged"
        gaps.append({"reason": reason, "action": "Run `stallscope explain` on the node traces."})
    if len(answer["rows"]) == MAX_VERDICTS:
        gaps.append({"reason": f"the job has {MAX_VERDICTS} verdicts or more", "action": "Read its report."})
    return gaps


def _shares(client: HubClient, about: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the job's GPU time: productive, and lost by reason."""
    window = {"from": about["begin"], "to": about["end"] or about["last_seen"]}
    rows = client.ask("fleet.cluster.goodput", {"job": about["job"], **window})["rows"]
    hours = sum(row["gpu_hours"] for row in rows)
    return {name: round(sum(row[name] for row in rows) / hours, 4) for name in PARTS} if hours else {}


def _usd_per_hour(
    cost: Mapping[str, Any], seconds: float, verdicts: list[dict[str, Any]]
) -> dict[str, float | None]:
    """Both ends of the cost per hour; None where a price, a loss or the time is unknown."""
    is_unknown = any(verdict["cost"] is None for verdict in verdicts)
    has_loss = bool(cost["gpu_seconds"] or cost["at_most_gpu_seconds"])
    low = cost["usd"] if has_loss or is_unknown else 0.0
    high = low if cost["at_most_usd"] is None else cost["at_most_usd"]
    is_open = cost["is_lower_bound"] and cost["at_most_usd"] is None
    if is_open or is_unknown or cost["without_price"]:
        high = None
    return {"usd_per_hour": _rate(low, seconds), "max_usd_per_hour": _rate(high, seconds)}


def _rate(usd: float | None, seconds: float) -> float | None:
    if not usd:
        return usd
    return usd / seconds * 3600 if seconds else None
