"""fleet.cluster.get_cost: incidents x what a GPU hour costs."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from stallscope import rates
from stallscope.events.counted import counted
from stallscope.rates import Found, RateTable
from stallscope.serve.tools.asking import MAX_TEXT, Asker, Cluster, From, To, said, window
from stallscope.serve.tools.registry import Params, Result, Row, Tool

_HOUR_NS = 3_600_000_000_000


class CostParams(Params):
    cluster: Cluster = None
    from_: From = None
    to: To = None
    by: Literal["rank", "cluster", "rate_class"] = Field(
        default="rank", description="One row for each of these."
    )
    provider: str | None = Field(
        default=None, max_length=MAX_TEXT, description="Where machines do not tell theirs: aws, ec2, gcp, ..."
    )
    gpu: str | None = Field(
        default=None, max_length=MAX_TEXT, description="The same for the GPU model: H100, ..."
    )
    limit: int = Field(default=20, ge=1, le=1000)


class CostRow(Row):
    cluster: str | None
    node: str | None
    rank: int | None = Field(description="The rank that caused it; null where none is named.")
    rate_class: str | None = Field(
        description="Provider and GPU model of the price; null where there is none."
    )
    usd_per_gpu_hour: float | None
    n_incidents: int
    gpu_seconds: float
    usd: float | None = Field(description="null where no price is known: it is not 0.")
    usd_per_hour: float | None = Field(description="usd by hours of the window.")


class Unpriced(Row):
    provider: str | None
    gpu: str | None
    gpu_seconds: float


class Cost(Result):
    summary: str
    rows: list[CostRow]
    usd: float | None = Field(description="Of all that has a price; null where nothing has one.")
    usd_per_hour: float | None
    gpu_seconds: float
    is_lower_bound: bool = Field(description="At least so much: an incident could be counted in part only.")
    without_price: list[Unpriced] = Field(description="GPU seconds whose price is not known; not in usd.")
    window_from: str | None
    window_to: str | None
    rates_as_of: str
    used_fallback: bool = Field(description="A price is not the provider's own but that of `any`.")


@dataclass(frozen=True)
class _Loss:
    """One incident's part within the window. price: None where unknown."""

    row: dict[str, Any]
    gpu_seconds: float
    price: Found | None

    @property
    def rate_class(self) -> str | None:
        return f"{self.price.rate.provider}/{self.price.rate.gpu}" if self.price else None

    @property
    def usd(self) -> float | None:
        return self.gpu_seconds / 3600 * self.price.rate.usd_per_hour if self.price else None


def get_cost(asker: Asker, params: CostParams) -> Cost:
    """What delays cost: GPU time that others lost waiting, times the price of their GPUs.

    An incident that reaches out of the window counts by its share within. A missing price is said, and never 0.
    """
    now_ns = asker.hub.now_ns()
    times = window(params.from_, params.to)
    rows = asker.rows("incidents_with_gpus", cluster=params.cluster, now_ns=now_ns, **times)
    losses = [_loss(row, params, asker.hub.rates) for row in rows]
    begin_ns = (
        params.from_ if params.from_ is not None else min((row["since_ns"] for row in rows), default=None)
    )
    end_ns = params.to if params.to is not None else max((row["until_ns"] for row in rows), default=None)
    hours = None
    if begin_ns is not None and end_ns is not None and end_ns > begin_ns:
        hours = (end_ns - begin_ns) / _HOUR_NS
    usd = _sum([loss.usd for loss in losses])
    is_least = any(loss.row["is_lower_bound"] for loss in losses)
    unpriced = _unpriced(losses, params)
    return Cost(
        summary=_said(losses, usd, is_least, unpriced),
        rows=_grouped(losses, params, hours)[: params.limit],
        usd=_cents(usd),
        usd_per_hour=_cents(usd / hours) if usd is not None and hours else None,
        gpu_seconds=round(sum(loss.gpu_seconds for loss in losses), 3),
        is_lower_bound=is_least,
        without_price=unpriced,
        window_from=said(begin_ns),
        window_to=said(end_ns),
        rates_as_of=asker.hub.rates.as_of,
        used_fallback=any(loss.price is not None and loss.price.how == "fallback" for loss in losses),
    )


def _loss(row: dict[str, Any], params: CostParams, table: RateTable) -> _Loss:
    price = rates.lookup(
        table, gpu=row["gpu_model"] or params.gpu, provider=row["provider"] or params.provider
    )
    return _Loss(row, row["gpu_seconds"] * _share_within(row, params), price)


def _share_within(row: dict[str, Any], params: CostParams) -> float:
    """The share of an incident's time that lies in the window; 1 for one without length."""
    begin, end = row["since_ns"], row["until_ns"]
    if end <= begin:
        return 1.0
    inside_begin = begin if params.from_ is None else max(begin, params.from_)
    inside_end = end if params.to is None else min(end, params.to)
    return max(0, inside_end - inside_begin) / (end - begin)


def _grouped(losses: list[_Loss], params: CostParams, hours: float | None) -> list[CostRow]:
    groups: dict[tuple[Any, ...], list[_Loss]] = defaultdict(list)
    for loss in losses:
        groups[_key(loss, params.by)].append(loss)
    rows = [_row(key, members, hours) for key, members in groups.items()]
    return sorted(
        rows, key=lambda row: (-(row.usd or 0), -row.gpu_seconds, row.cluster or "", row.rank or -1)
    )


def _key(loss: _Loss, by: str) -> tuple[Any, ...]:
    """cluster, node, rank, rate class; None for what is not told apart."""
    row = loss.row
    if by == "rank":
        return row["cluster_id"], row["node_id"], row["rank"], loss.rate_class
    return (row["cluster_id"], None, None, None) if by == "cluster" else (None, None, None, loss.rate_class)


def _row(key: tuple[Any, ...], members: list[_Loss], hours: float | None) -> CostRow:
    usd = _sum([loss.usd for loss in members])
    prices = {loss.price.rate.usd_per_hour for loss in members if loss.price}
    return CostRow(
        cluster=key[0],
        node=key[1],
        rank=key[2],
        rate_class=key[3],
        usd_per_gpu_hour=prices.pop() if len(prices) == 1 else None,
        n_incidents=len(members),
        gpu_seconds=round(sum(loss.gpu_seconds for loss in members), 3),
        usd=_cents(usd),
        usd_per_hour=_cents(usd / hours) if usd is not None and hours else None,
    )


def _unpriced(losses: list[_Loss], params: CostParams) -> list[Unpriced]:
    seconds: dict[tuple[str | None, str | None], float] = defaultdict(float)
    for loss in losses:
        if loss.price is None:
            provider, gpu = loss.row["provider"] or params.provider, loss.row["gpu_model"] or params.gpu
            seconds[provider, gpu] += loss.gpu_seconds
    return [
        Unpriced(provider=provider, gpu=gpu, gpu_seconds=round(lost, 3))
        for (provider, gpu), lost in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def _said(losses: list[_Loss], usd: float | None, is_least: bool, unpriced: list[Unpriced]) -> str:
    if not losses:
        return "Nothing was lost to delays."
    seconds = sum(loss.gpu_seconds for loss in losses)
    least = "at least " if is_least else ""
    priced = f"{least}${usd:,.2f}" if usd is not None else "an unknown price"
    text = f"{counted(len(losses), 'incident')} cost {priced} ({least}{seconds:,.1f} GPU seconds)."
    if unpriced:
        missing = unpriced[0]
        what = f"{missing.gpu or 'a GPU that is not known'} at {missing.provider or 'a provider that is not known'}"
        lost = sum(each.gpu_seconds for each in unpriced)
        text += f" No price is known for {what}: {lost:,.1f} GPU seconds are not in it."
    return text


def _sum(parts: list[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _cents(usd: float | None) -> float | None:
    """Rounded to hundredths of a cent."""
    return None if usd is None else round(usd, 4)


TOOL = Tool("fleet.cluster.get_cost", "What delays cost", get_cost)
