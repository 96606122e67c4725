"""The evidence for an answer: how complete the examined data is, and why the answer may be inconclusive.

"Healthy" is an answer only where a fault would have been visible. gaps() lists what hides a fault, each with the next
step that would decide. Pure: takes counts, reads nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.counted import counted, counted_reason
from stallscope.events.trace import Coverage, Gap

SLOWNESS = "slowness"
"""The blind spot of sources that show which calls have not completed, and no times: they show hangs only."""

_MORE_STEPS = "Trace or profile at least 20 steps, after the warm-up."
_REST_OF_JOB = "Trace them too and merge the traces (stallscope merge), or let all agents send to one hub."


@dataclass(frozen=True)
class Evidence:
    """How complete the examined data is.

    n_ranks: ranks with data. n_ranks_unseen: further ranks of the job, as the communicators or the dumps state.
    n_whole_rounds: rounds in which every rank with data that uses the communicator has been matched.
    n_steps: steps examined, None where the answer needs none: a source that shows hangs only, a process that is judged
    by its time budget. has_pattern: the steps are a repeating pattern of calls, or annotated.
    step_ms: the typical step, None where unknown.
    clock_error_ms: largest error of the alignment of the nodes' clocks, None on one node.
    matching_error_ms: error of the rounds of ranks attached late, None where the rounds are known.
    n_clocks_apart: nodes whose clocks could not be aligned. n_records: all rows; n_lost_records: lost by the capture.
    hosts_run_ahead: the hosts do not wait for their GPUs in most steps, and the source has no times of the GPUs.
    min_change_share: the smallest share by which the steps may become longer at some moment so that it is reported;
    None where verdicts are reported, or where no steps are compared.
    unclear_change_share: by how much the steps are longer on average from step unclear_change_step on, where their
    variation may be the reason; n_steps_to_decide: steps that show whether it is. None without such a difference.
    coverage: limits of the source.
    """

    n_ranks: int
    n_ranks_unseen: int = 0
    n_rounds: int = 0
    n_whole_rounds: int = 0
    n_steps: int | None = None
    has_pattern: bool = True
    step_ms: float | None = None
    clock_error_ms: float | None = None
    matching_error_ms: float | None = None
    n_clocks_apart: int = 0
    n_records: int = 0
    n_lost_records: int = 0
    hosts_run_ahead: bool = False
    min_change_share: float | None = None
    unclear_change_share: float | None = None
    unclear_change_step: int | None = None
    n_steps_to_decide: int | None = None
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def whole_share(self) -> float:
        """Share of the rounds that are matched on all their members; 1 where there are none."""
        return self.n_whole_rounds / self.n_rounds if self.n_rounds else 1.0

    @property
    def shows_slowness(self) -> bool:
        return SLOWNESS not in self.coverage.blind_spots

    def as_json(self) -> dict[str, Any]:
        """As in a report's JSON."""
        out = {name: value for name, value in asdict(self).items() if name not in ("coverage", "step_ms")}
        return out | {
            "whole_round_share": round(self.whole_share, 4),
            "omitted": dict(self.coverage.omitted),
            "blind_spots": list(self.coverage.blind_spots),
        }


def joined(parts: Sequence[Evidence]) -> Evidence:
    """The evidence on several jobs of one trace."""
    steps = [part.n_steps for part in parts if part.n_steps is not None]
    errors = [part.clock_error_ms for part in parts if part.clock_error_ms is not None]
    of_matching = [part.matching_error_ms for part in parts if part.matching_error_ms is not None]
    of_change = [part.min_change_share for part in parts if part.min_change_share is not None]
    unclear = max(parts, key=lambda part: part.unclear_change_share or 0.0, default=Evidence(n_ranks=0))
    return Evidence(
        n_ranks=sum(part.n_ranks for part in parts),
        n_ranks_unseen=sum(part.n_ranks_unseen for part in parts),
        n_rounds=sum(part.n_rounds for part in parts),
        n_whole_rounds=sum(part.n_whole_rounds for part in parts),
        n_steps=sum(steps) if steps else None,
        has_pattern=all(part.has_pattern for part in parts),
        clock_error_ms=max(errors, default=None),
        matching_error_ms=max(of_matching, default=None),
        n_clocks_apart=sum(part.n_clocks_apart for part in parts),
        n_records=sum(part.n_records for part in parts),
        n_lost_records=max((part.n_lost_records for part in parts), default=0),
        hosts_run_ahead=any(part.hosts_run_ahead for part in parts),
        min_change_share=max(of_change, default=None),
        unclear_change_share=unclear.unclear_change_share,
        unclear_change_step=unclear.unclear_change_step,
        n_steps_to_decide=unclear.n_steps_to_decide,
        coverage=Coverage.joined(part.coverage for part in parts),
    )


def from_counts(examined: Mapping[str, Any], coverage: Coverage) -> Evidence:
    """The evidence where a report states counts only, as on a process without peers."""
    n_rounds = int(examined.get("n_rounds", 0))
    return Evidence(
        n_ranks=int(examined["n_ranks"]),
        n_ranks_unseen=int(examined.get("n_ranks_unseen", 0)),
        n_rounds=n_rounds,
        n_whole_rounds=n_rounds,
        n_steps=int(examined.get("n_steps", 0)),
        n_lost_records=int(examined.get("n_lost_records", 0)),
        coverage=coverage,
    )


def gaps(evidence: Evidence, limits: Thresholds) -> tuple[Gap, ...]:
    """Why the answer is inconclusive if no fault is reported; empty if the data shows a healthy job."""
    return tuple(_of_source(evidence, limits)) + tuple(_of_records(evidence, limits))


def _of_source(evidence: Evidence, limits: Thresholds) -> Iterable[Gap]:
    """Gaps that the reader of the source states, or that its counts show."""
    yield from evidence.coverage.gaps
    if evidence.n_ranks_unseen:
        n_ranks = evidence.n_ranks + evidence.n_ranks_unseen
        if evidence.shows_slowness:
            verb = "is" if evidence.n_ranks_unseen == 1 else "are"
            yield Gap(f"{evidence.n_ranks_unseen} of {n_ranks} ranks {verb} not in this trace", _REST_OF_JOB)
        else:
            yield Gap(
                f"{evidence.n_ranks_unseen} of {n_ranks} ranks left no data",
                "Collect the dumps of all ranks, or dump the stacks of the missing ranks (py-spy dump --native).",
            )
    n_omitted = sum(evidence.coverage.omitted.values())
    if n_omitted > limits.lost_share * max(evidence.n_records, 1):
        reasons = ", ".join(counted_reason(n, reason) for reason, n in evidence.coverage.omitted.items())
        yield Gap(
            f"only part of the source was read: {reasons}",
            "Record again, or report the file that was left out.",
        )


def _of_records(evidence: Evidence, limits: Thresholds) -> Iterable[Gap]:
    """Gaps in the records of a source that can show slowness."""
    if not evidence.shows_slowness:
        return
    if evidence.n_lost_records > limits.lost_share * max(evidence.n_records, 1):
        yield Gap(
            f"{counted(evidence.n_lost_records, 'record')} lost, of {evidence.n_records + evidence.n_lost_records}",
            "Trace again with a larger ring buffer (stallscope trace --help), or fewer event groups.",
        )
    if evidence.whole_share < limits.whole_round_share:
        n_missing = evidence.n_rounds - evidence.n_whole_rounds
        yield Gap(
            f"{n_missing} of {evidence.n_rounds} rounds lack members: clocks may be misaligned, or records missing",
            "Trace all ranks over the same time, and check that the hosts' clocks are synchronised (chronyc tracking).",
        )
    if evidence.n_clocks_apart:
        yield Gap(
            f"the clocks of {counted(evidence.n_clocks_apart, 'node')} could not be aligned with the others'",
            "Synchronise the hosts' clocks (NTP or PTP), or trace until the nodes have shared more rounds.",
        )
    elif _hides(evidence.clock_error_ms, evidence, limits):
        yield Gap(
            f"the nodes' clocks are aligned only within {evidence.clock_error_ms:.1f} ms, and a step takes "
            f"{evidence.step_ms:.1f} ms",
            "Synchronise the hosts' clocks (NTP or PTP), and trace longer.",
        )
    if _hides(evidence.matching_error_ms, evidence, limits):
        yield Gap(
            f"the agent was attached while the job ran, so the rounds of its ranks are known only to within "
            f"{evidence.matching_error_ms:.1f} ms: a rank that is late by less than twice this time in every step "
            "would not be reported",
            "Trace from the start of the job, or read the value of the loss in every step while you trace.",
        )
    if evidence.n_steps is not None and evidence.n_steps < limits.steady_steps:
        yield Gap(_few_steps(evidence), _MORE_STEPS)
    elif not evidence.has_pattern:
        yield Gap(
            f"the calls do not repeat: {evidence.n_steps} intervals between waits were examined, which may be parts of "
            "fewer steps",
            f"{_MORE_STEPS} Or annotate the steps (stallscope.annotate).",
        )
    if evidence.unclear_change_share is not None:
        yield Gap(
            f"the steps are {evidence.unclear_change_share:.0%} longer on average from step "
            f"{evidence.unclear_change_step} on: the job has become slower, or this is the variation of its steps",
            f"Examine about {evidence.n_steps_to_decide} steps in all: a change of this size shows in them.",
        )
    if evidence.hosts_run_ahead:
        yield Gap(
            "the hosts run ahead of their GPUs and do not wait for them in most steps, and GPU times were not "
            "recorded: a slow GPU, or a delay that a launch queue hides, would not show",
            "Record the GPUs as well (NCCL's profiler plugin: stallscope plugin), or read the value of the loss in "
            "every step while you trace.",
        )


def _hides(error_ms: float | None, evidence: Evidence, limits: Thresholds) -> bool:
    """Whether lateness worth a report can hide behind an error of the arrivals."""
    if error_ms is None or not evidence.step_ms:
        return False
    hidden_ms = limits.clock_error_factor * error_ms
    return hidden_ms > max(limits.min_late_ns / 1e6, limits.hidden_step_share * evidence.step_ms)


def _few_steps(evidence: Evidence) -> str:
    if not evidence.n_steps:
        return "no steps were examined"
    return f"only {counted(evidence.n_steps, 'step')} examined"
