"""The state of a job after its last evaluation: identity, members, times, and the answer with its evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stallscope.diagnose.report.evidence import Evidence, gaps
from stallscope.diagnose.report.verdict import Answer, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Gap

_MAX_NAMES = 3
_NOT_EVALUATED = Gap(
    "too few rows have arrived for an evaluation", "Wait until the job has made about 20 steps."
)


@dataclass(frozen=True)
class Member:
    """A process of a job. rank: None if unknown."""

    node: str
    pid: int
    rank: int | None


@dataclass(frozen=True)
class JobState:
    """A job. id: its largest communicator, or its first process if no communicator has a known identity.

    Times are ns of the wall clock if clock readings are known. begin_ns, last_ns: first and last collective; of a job
    without collectives, of its processes. ended_ns: None while the job runs.
    evidence: of the last evaluation, None before it. reasons: why the answer is inconclusive.
    owner: labels of events/owner.py that all members share.
    """

    id: str
    members: tuple[Member, ...]
    begin_ns: int | None
    last_ns: int | None
    ended_ns: int | None
    answer: Answer
    evidence: Evidence | None
    reasons: tuple[Gap, ...]
    owner: Mapping[str, str] = field(default_factory=dict)


def silent_nodes(silent_ns: Mapping[str, int], *, n_ranks: int, n_all: int) -> list[Gap]:
    """The gap by nodes that report nothing while other nodes of the job do. silent_ns: since when, by node.

    n_ranks: ranks on these nodes, of n_all.
    """
    if not silent_ns:
        return []
    names = sorted(silent_ns)
    shown = ", ".join(names[:_MAX_NAMES]) + (
        f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else ""
    )
    verb = "has" if len(names) == 1 else "have"
    since_s = min(silent_ns.values()) // 1_000_000_000
    return [
        Gap(
            f"{shown} {verb} sent no rows for {since_s} s, while other nodes of the job sent rows: "
            f"{n_ranks} of {n_all} ranks are no longer examined",
            "Check the agent there: whether it runs, and whether it reaches the hub.",
        )
    ]


def answered(
    verdicts: Sequence[Verdict],
    evidence: Evidence | None,
    limits: Thresholds,
    *,
    silent: Sequence[Gap] = (),
) -> tuple[Answer, tuple[Gap, ...]]:
    """The answer and its reasons, as of a report with these verdicts. silent: see silent_nodes()."""
    abstained = [verdict for verdict in verdicts if verdict.kind == "inconclusive"]
    if len(abstained) < len(verdicts):
        return Answer.FOUND, ()
    reasons = [
        Gap(verdict.abstained_because or verdict.summary, " ".join(verdict.advice)) for verdict in abstained
    ]
    reasons += [*silent, *(gaps(evidence, limits) if evidence else [_NOT_EVALUATED])]
    return (Answer.INCONCLUSIVE if reasons else Answer.HEALTHY), tuple(reasons)
