"""The fields of a verdict as a flat row: every interface shows a verdict under these names.

The hub's table, the tools of node and hub and the attributes of OTLP incidents are made from this list;
diagnose/report/row.py fills it. A new field needs a line here, with the next version of the hub's schema, and its value
in diagnose/report/verdict.py.
"""

from dataclasses import dataclass
from typing import Literal

from stallscope.events.owner import GROUP_LABELS, OWNER_LABELS, column

KINDS = (
    *("failure", "hang", "mismatch", "dead_server", "straggler", "device", "link"),
    *("process", "latency", "change", "imbalance", "idle", "inconclusive"),
)
"""The kinds of verdicts, the most urgent first."""
NODE_KINDS = ("dead_server", "latency")
"""The kinds that the diagnosis on a machine judges also for a hub, which has no stacks and no single requests."""
SEVERITIES = ("low", "medium", "high", "critical")
STATES = ("open", "closed")

FieldType = Literal["text", "number", "integer", "boolean", "time", "texts", "integers"]


@dataclass(frozen=True)
class VerdictField:
    """name: the name in rows and columns.

    hub_schema: the version of the hub's schema that added the column; a new field takes the next version.
    A time is int64 ns since 1970; in JSON its name lacks the `_ns`, and its value is ISO 8601.
    """

    name: str
    type: FieldType
    meaning: str
    is_required: bool = False
    hub_schema: int = 1

    @property
    def json_name(self) -> str:
        return self.name.removesuffix("_ns") if self.type == "time" else self.name


FIELDS = (
    VerdictField("kind", "text", ", ".join(KINDS), is_required=True),
    VerdictField(
        "severity",
        "text",
        f"{', '.join(reversed(SEVERITIES))}: from cost, confidence and share of the job",
        hub_schema=4,
    ),
    VerdictField("summary", "text", "one sentence"),
    VerdictField("since_ns", "time", "start of the delay"),
    VerdictField("until_ns", "time", "end of the delay in the data examined"),
    VerdictField("ranks", "integers", "the culprit ranks; empty if none is named"),
    VerdictField("nodes", "texts", "their machines"),
    VerdictField("pids", "integers", "their processes, in the order of ranks", hub_schema=4),
    VerdictField("victims", "integers", "the ranks that waited for them", hub_schema=4),
    VerdictField("comm_hash", "text", "communicator"),
    VerdictField("first_round", "integer", "the first late round of that communicator", hub_schema=4),
    VerdictField("last_round", "integer", "the last late round of that communicator", hub_schema=4),
    VerdictField("n_late_rounds", "integer", "late rounds"),
    VerdictField("n_incidents", "integer", "groups of late steps", hub_schema=4),
    VerdictField("period_steps", "integer", "the delay recurs after this many steps", hub_schema=4),
    VerdictField("late_ms", "number", "median lateness over the late steps"),
    VerdictField("max_late_ms", "number", "largest lateness", hub_schema=4),
    VerdictField("cause", "text", "the cause with the largest share"),
    VerdictField("cause_share", "number", "its share of the excess time, 0 to 1"),
    VerdictField("confidence", "number", "0 to 1"),
    VerdictField("abstained_because", "text", "why no rank is named", hub_schema=4),
    VerdictField("gpu_seconds", "number", "GPU time lost; the lower end where a range is known"),
    VerdictField("at_most_gpu_seconds", "number", "the upper end; null without a range", hub_schema=3),
    VerdictField("is_lower_bound", "boolean", "the loss is at least gpu_seconds"),
    VerdictField("usd", "number", "price of gpu_seconds; null where no price is known"),
    VerdictField("at_most_usd", "number", "price of at_most_gpu_seconds", hub_schema=3),
    VerdictField("advice", "texts", "next steps for the user", hub_schema=4),
    *(
        VerdictField(column(label), "text", f"owner: {OWNER_LABELS[label]}", hub_schema=6)
        for label in GROUP_LABELS
    ),
)
"""In display order."""
