"""One report on several sources of one job, such as logs, dumps and profiles.

A fault that two sources name is one verdict. Where a source states that a rank failed, verdicts on its victims are
secondary: they become remarks, and so do the reasons of sources that cannot decide.
"""

from collections.abc import Sequence
from dataclasses import replace

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.verdicts.by_job import together
from stallscope.events.verdict_fields import KINDS

_ENDS = ("failure", "hang")
_SAME_JOB = ("n_ranks", "n_nodes")


def joint(reports: Sequence[Report]) -> Report:
    """The report on the sources of one job; the report itself for a single source."""
    if len(reports) == 1:
        return reports[0]
    whole = together(list(reports))
    kept: list[Verdict] = []
    remarks: list[dict[str, object]] = []
    for verdict in sorted(whole.verdicts, key=lambda each: KINDS.index(each.kind)):
        same = next((i for i, known in enumerate(kept) if _is_same(known, verdict)), None)
        if same is not None:
            victims = sorted({*kept[same].victims, *verdict.victims} - set(verdict.ranks))
            kept[same] = replace(kept[same], victims=victims)
        elif any(_explains(known, verdict) for known in kept):
            remarks.append({"what": f"secondary: {verdict.summary}"})
        else:
            kept.append(verdict)
    if any(verdict.kind != "inconclusive" for verdict in kept):
        remarks += [{"what": v.summary} for v in kept if v.kind == "inconclusive"]
        kept = [verdict for verdict in kept if verdict.kind != "inconclusive"]
    examined = {name: n for name, n in whole.examined.items() if name != "n_jobs"}
    examined |= {name: max(report.examined.get(name, 0) for report in reports) for name in _SAME_JOB}
    sources = "; ".join(dict.fromkeys(report.source.rstrip(".") for report in reports if report.source))
    return replace(whole, source=sources, examined=examined, verdicts=kept, benign=[*whole.benign, *remarks])


def _is_same(known: Verdict, verdict: Verdict) -> bool:
    """Whether two verdicts name one fault."""
    kinds = {known.kind, verdict.kind}
    return bool(known.ranks) and known.ranks == verdict.ranks and (len(kinds) == 1 or kinds <= set(_ENDS))


def _explains(known: Verdict, verdict: Verdict) -> bool:
    """Whether the failure of a rank explains the later failures of its victims."""
    are_victims = bool(verdict.ranks) and set(verdict.ranks) <= set(known.victims)
    return known.kind == verdict.kind == "failure" and are_victims
