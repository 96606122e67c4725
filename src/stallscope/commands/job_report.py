"""The post-mortem of one job as data and as text: timeline, incidents, cost, evidence, changes to make.

The same shape for a job of a hub and for a node trace. Times are ISO 8601 text, None where unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stallscope.commands.hub_job import MAX_VERDICTS, only_job
from stallscope.events.counted import counted

if TYPE_CHECKING:
    from stallscope.serve.client import HubClient

Report = dict[str, Any]

_MAX_INCIDENTS = 20
_SCREEN_INCIDENTS = 4
_SCREEN_CHANGES = 3


def of_hub(client: HubClient, job: str) -> Report:
    """The report on a job of a hub. Raises the hub's errors, NotFound for an unknown job."""
    answer = client.ask("fleet.cluster.verdicts", {"job": job, "limit": MAX_VERDICTS})
    about = only_job(answer["jobs"], job)
    cost = client.ask("fleet.cluster.get_cost", {"job": job, "limit": 1000})
    costliest = sorted(answer["rows"], key=_loss, reverse=True)
    incidents = []
    for row in costliest[:_MAX_INCIDENTS]:
        detail = client.ask("fleet.cluster.verdicts", {"job": job, "verdict_id": row["verdict_id"]})
        incidents.append(_incident(row, detail["verdict"] or {}))
    names = ("job", "cluster", "answer", "reasons", "n_ranks", "nodes", "begin", "end", "evidence", "owner")
    return _whole(
        {name: about.get(name) for name in names} | {"last": about["last_seen"]},
        incidents,
        n_left_out=len(costliest) - len(incidents),
        cost={name: cost[name] for name in ("gpu_seconds", "at_most_gpu_seconds", "usd", "at_most_usd")}
        | {"is_lower_bound": cost["is_lower_bound"]},
    )


def of_report(report: Mapping[str, Any], name: str) -> Report:
    """The report on a node trace. report: `explain --json`. name: of the trace."""
    examined, verdicts = report["examined"], report["verdicts"]
    incidents = [_incident(_flat(verdict), verdict) for verdict in verdicts]
    incidents.sort(key=_loss, reverse=True)
    owners = [verdict["owner"] for verdict in verdicts if verdict.get("owner")]
    about = {
        "job": name,
        "cluster": None,
        "answer": report["answer"],
        "reasons": report["gaps"],
        "n_ranks": examined.get("n_ranks"),
        "nodes": sorted({node for each in incidents for node in each["nodes"]}),
        "begin": None,
        "end": None,
        "last": None,
        "seconds": examined.get("seconds"),
        "evidence": report["evidence"],
        "owner": owners[0] if owners else {},
    }
    return _whole(
        about,
        incidents[:_MAX_INCIDENTS],
        n_left_out=max(0, len(incidents) - _MAX_INCIDENTS),
        cost=_sum(incidents),
    )


def _whole(about: Report, incidents: list[Report], *, n_left_out: int, cost: Report) -> Report:
    return about | {
        "summary": _summary(about, incidents, n_left_out),
        "cost": cost,
        "timeline": _timeline(about, incidents),
        "incidents": incidents,
        "n_incidents_left_out": n_left_out,
        "changes": _changes(about, incidents),
    }


def _incident(row: Mapping[str, Any], verdict: Mapping[str, Any]) -> Report:
    """The fields of an incident: of its flat row, and the evidence and recommendation of the whole verdict."""
    names = (
        *("verdict_id", "kind", "severity", "state", "summary", "since", "until", "ranks", "nodes", "cause"),
        *("cause_share", "late_ms", "confidence", "abstained_because", "gpu_seconds", "at_most_gpu_seconds"),
        *("is_lower_bound", "usd", "at_most_usd", "advice"),
    )
    return {name: row.get(name) for name in names} | {
        "nodes": row.get("nodes") or [],
        "advice": row.get("advice") or [],
        "evidence": verdict.get("evidence") or {},
        "causes": verdict.get("causes") or [],
        "recommendation": verdict.get("recommendation"),
        "closed_because": verdict.get("closed_because"),
    }


def _flat(verdict: Mapping[str, Any]) -> Report:
    """The flat fields of a verdict of `explain --json`."""
    cost, causes = verdict.get("cost") or {}, verdict["causes"]
    main = causes[0] if causes else {}
    return {
        **verdict,
        "late_ms": (verdict.get("late_ms") or {}).get("median"),
        "cause": main.get("cause"),
        "cause_share": main.get("share"),
        **{name: cost.get(name) for name in ("gpu_seconds", "at_most_gpu_seconds", "usd", "at_most_usd")},
        "is_lower_bound": cost.get("is_lower_bound"),
    }


def _sum(incidents: Sequence[Report]) -> Report:
    """The costs together; None where no incident has the value."""

    def total(low: str, high: str) -> float | None:
        values = [each[high] if each[high] is not None else each[low] for each in incidents]
        known = [value for value in values if value is not None]
        return round(sum(known), 4) if known else None

    return {
        "gpu_seconds": total("gpu_seconds", "gpu_seconds"),
        "at_most_gpu_seconds": total("gpu_seconds", "at_most_gpu_seconds"),
        "usd": total("usd", "usd"),
        "at_most_usd": total("usd", "at_most_usd"),
        "is_lower_bound": any(each["is_lower_bound"] or each["gpu_seconds"] is None for each in incidents),
    }


def _loss(row: Mapping[str, Any]) -> float:
    return float(row.get("at_most_gpu_seconds") or row.get("gpu_seconds") or 0.0)


def _summary(about: Mapping[str, Any], incidents: Sequence[Report], n_left_out: int) -> str:
    if incidents:
        more = f" ({counted(len(incidents) + n_left_out - 1, 'more incident')})" if len(incidents) > 1 else ""
        return f"{incidents[0]['summary']}{more}"
    if about["answer"] == "healthy":
        return "Healthy: no fault slowed down the job in the data examined."
    reasons = about["reasons"]
    return f"Inconclusive: {reasons[0]['reason'] if reasons else 'the data shows no cause'}."


def _timeline(about: Mapping[str, Any], incidents: Sequence[Report]) -> list[Report]:
    """Moments in order; an unknown time is left out."""
    moments = [{"at": about["begin"], "event": "begin", "text": "The job begins."}]
    for each in incidents:
        moments.append({"at": each["since"], "event": each["kind"], "text": each["summary"]})
        if each["state"] == "closed":
            because = f" ({each['closed_because']})" if each["closed_because"] else ""
            moments.append(
                {"at": each["until"], "event": "over", "text": f"Over: {each['summary']}{because}"}
            )
    moments.append({"at": about["end"], "event": "end", "text": "The job ends."})
    return sorted((moment for moment in moments if moment["at"]), key=lambda moment: str(moment["at"]))


def _changes(about: Mapping[str, Any], incidents: Sequence[Report]) -> list[Report]:
    """Advice by the cost of its incidents, each once; for an inconclusive answer the steps that would decide."""
    out: dict[str, Report] = {}
    for each in incidents:
        for advice in each["advice"]:
            entry = out.setdefault(advice, {"change": advice, "gpu_seconds": 0.0, "n_incidents": 0})
            entry["gpu_seconds"] += each["gpu_seconds"] or 0.0
            entry["n_incidents"] += 1
    decisive = [
        {"change": reason["action"], "gpu_seconds": None, "n_incidents": 0}
        for reason in about["reasons"]
        if reason["action"] not in out
    ]
    return sorted(out.values(), key=lambda entry: -entry["gpu_seconds"]) + decisive


def as_text(report: Report) -> str:
    """The whole report as text."""
    blocks = [_head(report)]
    if report["timeline"]:
        blocks.append(
            ["Timeline", *(f"  {clock(each['at'])}  {each['text']}" for each in report["timeline"])]
        )
    for number, each in enumerate(report["incidents"], 1):
        blocks.append(
            [f"Incident {number}: {each['summary']}", *(f"  {line}" for line in incident_lines(each))]
        )
    if report["n_incidents_left_out"]:
        blocks.append([f"{counted(report['n_incidents_left_out'], 'smaller incident')} left out."])
    if report["changes"]:
        blocks.append(
            ["Changes to make", *(f"  {n}. {each['change']}" for n, each in enumerate(report["changes"], 1))]
        )
    return "\n\n".join("\n".join(lines) for lines in blocks)


def as_screen(report: Report) -> str:
    """The report in less than 20 lines, for the end of a trace."""
    lines = _head(report)
    lines += [f"  - {each['summary']}" for each in report["incidents"][1:_SCREEN_INCIDENTS]]
    lines += [f"  action: {each['change']}" for each in report["changes"][:_SCREEN_CHANGES]]
    return "\n".join(lines)


def _head(report: Report) -> list[str]:
    lines = [f"Job {report['job']}: {report['answer']}", f"  {report['summary']}"]
    return lines + [f"  {name}: {value}" for name, value in facts(report) if value]


def facts(report: Report) -> list[tuple[str, str]]:
    """The facts at the top, as name and value; an unknown value is empty."""
    evidence = report["evidence"] or {}
    owner = ", ".join(f"{name} {value}" for name, value in (report["owner"] or {}).items())
    examined = [f"{counted(report['n_ranks'], 'rank')}"] if report["n_ranks"] else []
    if evidence.get("n_steps"):
        examined.append(counted(evidence["n_steps"], "step"))
    if report.get("seconds"):
        examined.append(f"{report['seconds']:,.3g} s")
    if evidence.get("n_ranks_unseen"):
        examined.append(f"{counted(evidence['n_ranks_unseen'], 'rank')} without data")
    if evidence.get("n_lost_records"):
        examined.append(f"{counted(evidence['n_lost_records'], 'record')} lost")
    end = clock(report["end"]) if report["end"] else f"still running at {clock(report['last'])}"
    return [
        ("time", f"{clock(report['begin'])} to {end}" if report["begin"] else ""),
        ("examined", ", ".join(examined)),
        ("machines", _bounded(report["nodes"])),
        ("owner", owner),
        ("cost", cost_text(report["cost"]) if report["incidents"] else ""),
        ("also", "; ".join(reason["reason"] for reason in report["reasons"]) if report["incidents"] else ""),
    ]


def incident_lines(each: Report) -> list[str]:
    """The facts of an incident, one a line."""
    until = clock(each["until"]) if each["until"] else "its end is unknown"
    share = f", {each['cause_share']:.0%} of the delay" if each["cause_share"] is not None else ""
    cause = (
        f"{each['cause']}{share}"
        if each["cause"]
        else f"unknown: {each['abstained_because'] or 'not in the data'}"
    )
    recommended = each["recommendation"] or {}
    rows = (
        ("time", f"{clock(each['since'])} to {until}" if each["since"] else ""),
        ("cause", cause),
        ("lateness", "" if each["late_ms"] is None else f"{each['late_ms']:,.1f} ms (median of late steps)"),
        ("cost", cost_text(each)),
        ("severity", f"{each['severity']}, confidence {each['confidence'] or 0:.0%}"),
        ("evidence", "; ".join(_evidence(each))),
        ("for programs", f"{recommended['action']}: {recommended['because']}" if recommended else ""),
    )
    return [f"{name}: {value}" for name, value in rows if value]


def cost_text(cost: Mapping[str, Any]) -> str:
    """GPU seconds and dollars, with both ends of a range."""
    if cost["gpu_seconds"] is None:
        return "not known"
    least = "at least " if cost.get("is_lower_bound") and cost["at_most_gpu_seconds"] is None else ""
    seconds = _range(cost["gpu_seconds"], cost["at_most_gpu_seconds"], "{:,.1f}")
    usd = "" if cost["usd"] is None else f", {_range(cost['usd'], cost['at_most_usd'], '${:,.2f}')}"
    return f"{least}{seconds} GPU seconds{usd}"


def clock(text: str | None) -> str:
    """A time for people, in UTC."""
    return f"{text[:19].replace('T', ' ')} UTC" if text else "unknown"


def _evidence(each: Report) -> list[str]:
    """Short facts of the evidence: numbers and texts; lists and tables are in JSON."""
    from stallscope.diagnose import without_old_names

    values = dict(each["evidence"])
    for cause in each["causes"]:
        values |= cause.get("evidence") or {}
    values = without_old_names(values)
    stack = values.pop("stack", None)
    plain = [
        f"{name.replace('_', ' ')} {value:,g}"
        if isinstance(value, float | int)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in values.items()
        if isinstance(value, str | float | int) and not isinstance(value, bool)
    ]
    return plain[:6] + ([f"at {stack[0]}"] if isinstance(stack, list) and stack else [])


def _range(low: float, high: float | None, form: str) -> str:
    same = high is None or form.format(high) == form.format(low)
    return form.format(low) if same else f"{form.format(low)} to {form.format(high)}"


def _bounded(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
