"""fleet.cluster.goodput: the share of GPU time without a known loss, by job or owner, and by day."""

from typing import Any, Literal

from pydantic import Field

from stallscope.events.goodput_parts import LOSSES
from stallscope.events.owner import SUM_LABELS
from stallscope.serve.tools.goodput_sums import GpuTime, Window, gpu_times
from stallscope.serve.tools.tenant_context import (
    Cluster,
    From,
    JobParams,
    TenantContext,
    To,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Row, Tool
from stallscope.serve.tools.verdict_row import stored_verdicts

GROUPS = ("job", *SUM_LABELS)
_MAX_ROWS = 20_000
_DAY_NS = 86_400 * 10**9


class GoodputParams(JobParams):
    cluster: Cluster = None
    from_: From = None
    to: To = None
    by: Literal[GROUPS] = Field(default="job", description="Grouping: one row per value.")  # type: ignore[valid-type]
    per_day: bool = Field(default=False, description="One row per value and UTC day.")
    limit: int = Field(default=100, ge=1, le=10_000)


class GoodputRow(Row):
    group: str | None = Field(description="The job or the owner; null where unknown.")
    day: str | None
    n_jobs: int
    gpu_hours: float = Field(
        description="GPU hours held by jobs, by pauses before restarts, and by idle GPUs."
    )
    goodput: float | None = Field(
        description="Share of gpu_hours without a known loss, 0 to 1: an upper bound."
    )
    productive: float = Field(description="GPU hours without a known loss.")
    stragglers: float = Field(description="GPU hours lost to slow ranks, GPUs and links.")
    hangs: float = Field(description="GPU hours lost to hangs and failures.")
    restarts: float = Field(description="GPU hours between two runs of one job.")
    input: float = Field(description="GPU hours lost while ranks waited for input data or disks.")
    idle: float = Field(description="GPU hours of GPUs held without use.")
    n_unknown_costs: int = Field(
        description="Verdicts without a known cost: their loss is part of productive, not of a loss."
    )


class Goodput(Result):
    summary: str
    rows: list[GoodputRow]
    is_complete: bool = Field(description="False if there are more jobs or verdicts than are summed.")


def goodput(context: TenantContext, params: GoodputParams) -> Goodput:
    """How much of the GPU time was productive, and how much was lost to stragglers, hangs, restarts, input, idleness.

    By job or owner, and by day. Without a window: the last 24 hours.
    """
    end_ns = params.to if params.to is not None else context.hub.now_ns()
    begin_ns = params.from_ if params.from_ is not None else end_ns - _DAY_NS
    times = window(begin_ns, end_ns)
    jobs = context.job_rows(params.choice, cluster=params.cluster, max_rows=_MAX_ROWS, **times)
    verdicts = stored_verdicts(
        context,
        cluster=params.cluster,
        choice=params.choice,
        max_rows=_MAX_ROWS,
        from_ns=begin_ns,
        to_ns=end_ns,
    )
    cells = gpu_times(jobs, verdicts, by=params.by, window=Window(begin_ns, end_ns, has_days=params.per_day))
    rows = [_row(group, day, time) for (group, day), time in cells.items()]
    rows.sort(key=lambda row: (row.day or "", -row.gpu_hours, row.group or ""))
    return Goodput(
        summary=_summary(list(cells.values())),
        rows=rows[: params.limit],
        is_complete=max(len(jobs), len(verdicts)) < _MAX_ROWS,
    )


def _row(group: str | None, day: str | None, time: GpuTime) -> GoodputRow:
    """Rounded such that productive and lost hours add up to gpu_hours."""
    held, lost = _hours(time.held), {name: _hours(time.lost[name]) for name in LOSSES}
    return GoodputRow(
        group=group,
        day=day,
        n_jobs=len(time.jobs),
        gpu_hours=held,
        goodput=round(time.productive / time.held, 4) if time.held else None,
        productive=max(round(held - sum(lost.values()), 6), 0.0),
        n_unknown_costs=time.n_unknown_costs,
        **lost,
    )


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 6)


def _amount(hours: float) -> str:
    """Three digits of a small number."""
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"


def _summary(times: list[GpuTime]) -> str:
    held = sum(time.held for time in times)
    unknown = _unknown_costs(sum(time.n_unknown_costs for time in times))
    if not held:
        return f"No job ran in the window{unknown}."
    productive = sum(time.productive for time in times)
    lost: dict[str, Any] = {name: sum(time.lost[name] for time in times) / held for name in LOSSES}
    parts = [
        f"{share:.1%} {name}" if share >= 0.0005 else f"less than 0.1% {name}"
        for name, share in lost.items()
        if share
    ]
    share = min(productive / held, 0.999) if parts else 1.0  # rounding hides no loss
    return (
        f"At most {share:.1%} of {_amount(held / 3600)} GPU hours were productive"
        f"{'; lost: ' + ', '.join(parts) if parts else ''}{unknown}."
    )


def _unknown_costs(n: int) -> str:
    """The end of the summary: losses that no number contains."""
    return f"; the cost of {n} verdict{'s' if n > 1 else ''} is unknown and not subtracted" if n else ""


TOOL = Tool("fleet.cluster.goodput", "Productive and lost GPU time", goodput)
