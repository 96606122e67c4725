"""fleet.cluster.get_cost: the cost of incidents, from GPU-hour prices."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from stallscope import rates
from stallscope.events.counted import counted
from stallscope.events.owner import SUM_LABELS, column
from stallscope.rates import AppliedRate, RateTable
from stallscope.serve.tools.job_answer import Answer, JobRow, answer_on, job_rows
from stallscope.serve.tools.tenant_context import (
    MAX_TEXT,
    Cluster,
    From,
    JobParams,
    TenantContext,
    To,
    iso_time,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Row, Tool

GROUPS = ("rank", "cluster", "rate_class", "gpu_model", *SUM_LABELS)
_HOUR_NS = 3_600_000_000_000


class CostParams(JobParams):
    cluster: Cluster = None
    from_: From = None
    to: To = None
    by: Literal[GROUPS] = Field(  # type: ignore[valid-type]
        default="rank", description="Grouping: one row per value."
    )
    provider: str | None = Field(
        default=None,
        max_length=MAX_TEXT,
        description="Provider of machines that report none: aws, ec2, gcp, ...",
    )
    gpu: str | None = Field(
        default=None, max_length=MAX_TEXT, description="GPU model of machines that report none: H100, ..."
    )
    limit: int = Field(default=20, ge=1, le=1000)


class CostRow(Row):
    cluster: str | None
    node: str | None
    rank: int | None = Field(description="The rank that caused the incidents; null if no rank is named.")
    rate_class: str | None = Field(description="Provider and GPU model of the price; null if there is none.")
    gpu_model: str | None = Field(description="Its GPU model; null where unknown, or another grouping.")
    owner: str | None = Field(description="The user, account, ... of the group; null where unknown.")
    usd_per_gpu_hour: float | None
    n_incidents: int
    gpu_seconds: float
    at_most_gpu_seconds: float | None
    usd: float | None = Field(description="null if no price is known; null does not mean 0.")
    at_most_usd: float | None
    usd_per_hour: float | None = Field(description="usd divided by the hours of the window.")


class Unpriced(Row):
    provider: str | None
    gpu: str | None
    gpu_seconds: float
    at_most_gpu_seconds: float | None


class Cost(Result):
    summary: str
    answer: Answer = Field(description="On all jobs: the cost may lack the losses of an inconclusive job.")
    rows: list[CostRow]
    usd: float | None = Field(description="Cost of all losses with a known price; null if no price is known.")
    at_most_usd: float | None = Field(description="The upper end of usd, if a range is known.")
    usd_per_hour: float | None
    gpu_seconds: float
    at_most_gpu_seconds: float | None = Field(
        description="The upper end of gpu_seconds; null if a single value is known, or no upper end."
    )
    is_lower_bound: bool = Field(
        description="True if parts of an incident are unknown: the cost is at least this."
    )
    without_price: list[Unpriced] = Field(
        description="GPU seconds without a known price; not included in usd."
    )
    window_from: str | None
    window_to: str | None
    rates_as_of: str
    used_fallback: bool = Field(
        description="A price of the provider `any` replaced a missing provider price."
    )


@dataclass(frozen=True)
class _Loss:
    """One incident's part within the window. at_most_gpu_seconds: None without a range. price: None if unknown."""

    row: dict[str, Any]
    gpu_seconds: float
    at_most_gpu_seconds: float | None
    price: AppliedRate | None

    @property
    def rate_class(self) -> str | None:
        return f"{self.price.rate.provider}/{self.price.rate.gpu}" if self.price else None

    @property
    def may_be_gpu_seconds(self) -> float:
        """The largest known value."""
        return self.gpu_seconds if self.at_most_gpu_seconds is None else self.at_most_gpu_seconds

    @property
    def has_no_upper_end(self) -> bool:
        return self.row["is_lower_bound"] and self.at_most_gpu_seconds is None

    def usd(self, gpu_seconds: float) -> float:
        """The price of these GPU seconds, 0 if unknown."""
        return gpu_seconds / 3600 * self.price.rate.usd_per_hour if self.price else 0.0


@dataclass(frozen=True)
class _Sum:
    """The cost of several incidents. at_most_...: None if a single value is known, or an incident has no upper end."""

    gpu_seconds: float
    at_most_gpu_seconds: float | None
    usd: float | None
    at_most_usd: float | None
    is_lower_bound: bool

    def seconds_fields(self) -> dict[str, Any]:
        """The fields of a row with GPU seconds."""
        return {
            "gpu_seconds": round(self.gpu_seconds, 3),
            "at_most_gpu_seconds": _rounded(self.at_most_gpu_seconds, 3),
        }

    def cost_fields(self, hours: float | None) -> dict[str, Any]:
        """The fields of a row with the cost. hours: of the window."""
        return self.seconds_fields() | {
            "usd": _rounded(self.usd, 4),
            "at_most_usd": _rounded(self.at_most_usd, 4),
            "usd_per_hour": _rounded(self.usd / hours, 4) if self.usd is not None and hours else None,
        }


def get_cost(context: TenantContext, params: CostParams) -> Cost:
    """The cost of delays: GPU time that other ranks lost by waiting, multiplied by the price of their GPUs.

    An incident that crosses the window's bounds counts in proportion. A missing price is reported, never counted as 0.
    """
    now_ns = context.hub.now_ns()
    times = window(params.from_, params.to)
    rows = context.rows(
        "incidents_with_gpus", only=params.choice, cluster=params.cluster, now_ns=now_ns, **times
    )
    losses = [_loss(row, params, context.hub.rates) for row in rows]
    begin_ns = (
        params.from_ if params.from_ is not None else min((row["since_ns"] for row in rows), default=None)
    )
    end_ns = params.to if params.to is not None else max((row["until_ns"] for row in rows), default=None)
    hours = None
    if begin_ns is not None and end_ns is not None and end_ns > begin_ns:
        hours = (end_ns - begin_ns) / _HOUR_NS
    total, unpriced = _sum(losses), _unpriced(losses, params)
    jobs = job_rows(context, cluster=params.cluster, choice=params.choice, times=times)
    return Cost(
        summary=_summary(losses, total, unpriced, jobs),
        answer=answer_on(jobs, context.caveat(params.cluster)),
        rows=_grouped(losses, params, hours)[: params.limit],
        **total.cost_fields(hours),
        is_lower_bound=total.is_lower_bound,
        without_price=unpriced,
        window_from=iso_time(begin_ns),
        window_to=iso_time(end_ns),
        rates_as_of=context.hub.rates.as_of,
        used_fallback=any(loss.price is not None and loss.price.how == "fallback" for loss in losses),
    )


def _loss(row: dict[str, Any], params: CostParams, table: RateTable) -> _Loss:
    price = rates.lookup(
        table, gpu=row["gpu_model"] or params.gpu, provider=row["provider"] or params.provider
    )
    share, most = _share_within(row, params), row["at_most_gpu_seconds"]
    return _Loss(row, row["gpu_seconds"] * share, None if most is None else most * share, price)


def _sum(losses: Sequence[_Loss]) -> _Sum:
    priced = [loss for loss in losses if loss.price]
    return _Sum(
        gpu_seconds=sum(loss.gpu_seconds for loss in losses),
        at_most_gpu_seconds=_upper_end(losses, lambda loss: loss.may_be_gpu_seconds),
        usd=sum(loss.usd(loss.gpu_seconds) for loss in priced) if priced else None,
        at_most_usd=_upper_end(priced, lambda loss: loss.usd(loss.may_be_gpu_seconds)),
        is_lower_bound=any(loss.row["is_lower_bound"] for loss in losses),
    )


def _upper_end(losses: Sequence[_Loss], most: Callable[[_Loss], float]) -> float | None:
    is_range = any(loss.at_most_gpu_seconds is not None for loss in losses)
    if not is_range or any(loss.has_no_upper_end for loss in losses):
        return None
    return sum(map(most, losses))


def _share_within(row: dict[str, Any], params: CostParams) -> float:
    """The share of an incident's time that lies in the window; 1 for an incident without length."""
    begin, end = row["since_ns"], row["until_ns"]
    if end <= begin:
        return 1.0
    inside_begin = begin if params.from_ is None else max(begin, params.from_)
    inside_end = end if params.to is None else min(end, params.to)
    return max(0, inside_end - inside_begin) / (end - begin)


def _grouped(losses: list[_Loss], params: CostParams, hours: float | None) -> list[CostRow]:
    groups: dict[_Group, list[_Loss]] = defaultdict(list)
    for loss in losses:
        groups[_group(loss, params.by)].append(loss)
    rows = [_row(group, members, hours) for group, members in groups.items()]
    return sorted(rows, key=_costliest_first)


def _costliest_first(row: CostRow) -> tuple[Any, ...]:
    """Sort key: the largest known cost first."""
    usd, gpu_seconds = row.at_most_usd or row.usd or 0, row.at_most_gpu_seconds or row.gpu_seconds
    return -usd, -gpu_seconds, row.cluster or "", row.rank or -1


class _Group(NamedTuple):
    """The fields that the losses of a group share; None for fields that are not grouped by."""

    cluster: str | None = None
    node: str | None = None
    rank: int | None = None
    rate_class: str | None = None
    gpu_model: str | None = None
    owner: str | None = None


def _group(loss: _Loss, by: str) -> _Group:
    row = loss.row
    if by == "rank":
        return _Group(row["cluster_id"], row["node_id"], row["rank"], loss.rate_class)
    if by == "cluster":
        return _Group(cluster=row["cluster_id"])
    if by == "rate_class":
        return _Group(rate_class=loss.rate_class)
    if by == "gpu_model":
        return _Group(gpu_model=row["gpu_model"])
    return _Group(owner=row[column(by)])


def _row(group: _Group, members: list[_Loss], hours: float | None) -> CostRow:
    prices = {loss.price.rate.usd_per_hour for loss in members if loss.price}
    return CostRow(
        **group._asdict(),
        usd_per_gpu_hour=prices.pop() if len(prices) == 1 else None,
        n_incidents=len(members),
        **_sum(members).cost_fields(hours),
    )


def _unpriced(losses: list[_Loss], params: CostParams) -> list[Unpriced]:
    groups: dict[tuple[str | None, str | None], list[_Loss]] = defaultdict(list)
    for loss in losses:
        if loss.price is None:
            groups[loss.row["provider"] or params.provider, loss.row["gpu_model"] or params.gpu].append(loss)
    rows = [
        Unpriced(provider=provider, gpu=gpu, **_sum(members).seconds_fields())
        for (provider, gpu), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row.at_most_gpu_seconds or row.gpu_seconds))


def _summary(losses: list[_Loss], total: _Sum, unpriced: list[Unpriced], jobs: Sequence[JobRow]) -> str:
    unknown = [job for job in jobs if job.answer == "inconclusive"]
    caveat = (
        f" {len(unknown)} of {counted(len(jobs), 'job')} inconclusive: a loss may be missing."
        if unknown
        else ""
    )
    if not losses and jobs and not unknown:
        return "No GPU time was lost to delays."
    if not losses:
        return f"No lost GPU time is known.{caveat or ' No job was examined in this time.'}"
    is_least = total.is_lower_bound
    lost = _range(total.gpu_seconds, total.at_most_gpu_seconds, form="{:,.1f}", is_least=is_least)
    text = f"{counted(len(losses), 'incident')} cost {lost} GPU seconds, in dollars an unknown amount."
    if total.usd is not None:
        priced = _range(total.usd, total.at_most_usd, form="${:,.2f}", is_least=is_least)
        text = f"{counted(len(losses), 'incident')} cost {priced} ({lost} GPU seconds)."
    if unpriced:
        missing = unpriced[0]
        what = f"{missing.gpu or 'an unknown GPU model'} at {missing.provider or 'an unknown provider'}"
        rest = _sum([loss for loss in losses if loss.price is None])
        left_out = _range(rest.gpu_seconds, rest.at_most_gpu_seconds, form="{:,.1f}", is_least=False)
        text += f" No price is known for {what}: the cost excludes {left_out} GPU seconds."
    return text + caveat


def _range(low: float, high: float | None, *, form: str, is_least: bool) -> str:
    """One value, or both ends; the lower end is omitted if it shows as 0."""
    least = form.format(low)
    if high is None:
        return f"at least {least}" if is_least else least
    return f"at most {form.format(high)}" if least == form.format(0) else f"{least} to {form.format(high)}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


TOOL = Tool("fleet.cluster.get_cost", "Cost of delays", get_cost)
