"""The same data give the same verdicts on every surface: explain, tools of node and hub, live records, OTLP."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope import rates
from stallscope.assistant.node_context import Node
from stallscope.assistant.tools.trace_verdicts import VerdictsParams as NodeParams
from stallscope.assistant.tools.trace_verdicts import verdicts as node_verdicts
from stallscope.commands.report import diagnosed
from stallscope.continuous import ContinuousDiagnosis
from stallscope.diagnose import Answer, Stream, Thresholds, as_json
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.trace import Clock, Trace
from stallscope.events.verdict_fields import FIELDS
from stallscope.exporters import hub_arrow, hub_batches
from stallscope.exporters.verdict_journal import VerdictJournal
from stallscope.live.incident_lines import ATTRIBUTES, Diagnosis, incident_line
from stallscope.live.trace_records import verdict_record
from stallscope.receive import arrow
from stallscope.serve.tools.tenant_context import Hub, TenantContext
from stallscope.serve.tools.verdicts import Verdicts, VerdictsParams, verdicts
from stallscope.settings import Settings
from stallscope.store import node
from stallscope.store.hub.store import HubStore

from ..diagnose.builders import MS, Call, Delay, Gone, Job, data_parallel, dp_trace, every, trace_of
from ..diagnose.cutting import Cut, Hand, batches
from ..diagnose.test_claimed_rank import with_claim
from ..diagnose.test_cuda_errors import failing, with_calls
from ..diagnose.test_job_separation import another, side_by_side
from ..diagnose.test_mismatched_rounds import changed
from ..diagnose.test_slow_gpu import slow_gpu
from ..patience import until

TENANT = "a"
PAIR = (Call(((0, 1, 2, 3),), count=1), Call(((0, 1, 2, 3),), count=2, waits=True))


def two_jobs() -> Trace:
    """Two jobs with the same ranks on one machine; rank 2 of the first is late."""
    return side_by_side(
        dp_trace(every(2, 5, 50 * MS, category=Category.IO)),
        another(dp_trace(), pids_from=100, later_ns=5 * MS),
    )


def failed() -> Trace:
    healthy = dp_trace()
    return with_calls(healthy, failing(healthy, 3, 719, at=1.5), failing(healthy, 2, 719))


SCENARIOS: dict[str, tuple[Callable[[], Trace], list[tuple[str, list[int]]]]] = {
    "disk": (lambda: dp_trace(every(2, 7, 50 * MS, category=Category.IO)), [("straggler", [2])]),
    "lock in every step": (
        lambda: dp_trace(every(1, 1, 40 * MS, category=Category.LOCK)),
        [("straggler", [1])],
    ),
    "two culprits": (
        lambda: dp_trace([*every(1, 4, 50 * MS), *every(3, 5, 80 * MS, category=Category.IO)]),
        [("straggler", [1]), ("straggler", [3])],
    ),
    "hang": (
        lambda: trace_of(Job(data_parallel(4), gone=(Gone(3, 20),), quiet_ns=60_000 * MS)),
        [("hang", [3])],
    ),
    "mismatch": (lambda: changed("count", 17), [("mismatch", [2])]),
    "slow GPU": (lambda: slow_gpu(lambda step: 4 * MS), [("device", [1])]),
    "delays that take turns": (
        lambda: trace_of(
            Job(PAIR, n_steps=60, delays=tuple(Delay(s % 4, s, 40 * MS) for s in range(4, 60, 3)))
        ),
        [("imbalance", [])],
    ),
    "failed call": (failed, [("failure", [2])]),
    "two jobs, a fault in one": (two_jobs, [("straggler", [2])]),
    "two processes claim a rank": (
        lambda: with_claim(dp_trace(every(2, 5, 50 * MS))),
        [("inconclusive", [])],
    ),
    "healthy": (dp_trace, []),
}

Row = dict[str, Any]


def of_explain(db: Path, _: Trace) -> list[Row]:
    """As `stallscope explain --json` prints them."""
    return as_json(diagnosed(node.read(db), Settings()))["verdicts"]


def of_node_tool(db: Path, _: Trace) -> list[Row]:
    return node_verdicts(Node(Settings(db=db)), NodeParams()).rows


def incident_lines(db: Path, trace: Trace) -> list[Row]:
    """The last change of each incident, as the process next to the agent prints it."""
    clock = Hand()
    diagnosis = Diagnosis(db, Thresholds(), clock=clock)
    lines: dict[str, Row] = {}
    changes = []
    for clock.now_ns, batch in batches(trace, Cut(12)):
        changes += diagnosis.changes(batch)
    for change in [*changes, *diagnosis.end()]:
        lines[change.incident_id] = incident_line(change)
    return [line for line in lines.values() if not line["reason"].startswith("part of")]


def of_live_records(db: Path, trace: Trace) -> list[Row]:
    """Through the table of the node trace to a line of `trace --json`; the page shows the same rows."""
    stored: list[tuple[int, str]] = []
    journal = VerdictJournal(None)
    for line in incident_lines(db, trace):
        journal.take(line)
    journal.write(lambda table, names, rows: stored.extend(rows))  # type: ignore[arg-type]
    return [verdict_record(at_ns, json.loads(text))["verdict"] for at_ns, text in stored]


def of_otlp(db: Path, trace: Trace) -> list[Row]:
    """The attributes of the spans, under the names of FIELDS."""
    lines = [line["attributes"] for line in incident_lines(db, trace)]
    own = {name for name in ATTRIBUTES if name != "stallscope.incident"}
    return [{name.removeprefix("stallscope."): line.get(name) for name in own} for line in lines]


def of_hub_tool(db: Path, trace: Trace) -> list[Row]:
    """The rows of the tool; its whole answer stays in HUB_ANSWERS."""
    HUB_ANSWERS[db] = hub_verdicts(db, trace)
    return HUB_ANSWERS[db].rows


HUB_ANSWERS: dict[Path, Verdicts] = {}


def hub_verdicts(db: Path, trace: Trace) -> Verdicts:
    """Sent as an agent does, diagnosed continuously, asked by the tool."""
    folder = db.with_suffix(".hub")
    with closing(HubStore.open(folder)) as store:
        with closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis:
            for body in sent(trace):
                store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
                until(diagnosis.is_idle)
            for shard in diagnosis._shards * 3:  # three evaluations without new rows
                ticked_s = shard._ticked_s
                until(lambda shard=shard, ticked_s=ticked_s: shard._ticked_s > ticked_s)
            until(diagnosis.is_idle)
        hub = Hub(store, rates.load(None), None)  # type: ignore[arg-type]
        return verdicts(TenantContext(hub, TENANT), VerdictsParams())


def sent(trace: Trace) -> list[bytes]:
    """The trace in six requests; its last moment was just now. Processes end with it, except in a hang."""
    ranks = {pid: (rank, -1) for pid, rank in trace.processes[["pid", "rank"]].tolist()}
    end_ns = max(int(trace.collectives["ts_ns"].max()), *trace.ends_ns)
    clock = Clock(0, end_ns, time.time_ns())
    rows = trace.collectives
    which = np.digitize(rows["ts_ns"], np.linspace(rows["ts_ns"].min(), rows["ts_ns"].max() + 1, 7)[1:-1])
    requests = []
    for number in range(6):
        tables = {"collectives": rows[which == number]}
        if number == 0:
            tables |= {name: getattr(trace, name) for name in ("processes", "communicators")}
        if number == 5:
            tables |= {name: getattr(trace, name) for name in ("calls", "snapshots")}
            if end_ns - int(rows["ts_ns"].max()) < 10_000 * MS:
                tables["processes"] = trace.processes.copy()
                tables["processes"]["ended_ns"] = end_ns
        on_wall = {
            table.name: hub_batches.on_wall_clock(
                table, tables[table.name], clock, trace.symbols, ranks=ranks
            )
            for table in layout.TABLES
            if len(tables.get(table.name, ()))
        }
        on_wall["clocks"] = hub_batches.clock_row(clock, is_synchronised=True)
        requests.append(
            hub_arrow.request(
                on_wall, batch_id=f"b{number}", node=trace.nodes[0] or "host", cluster="c", about={}
            )
        )
    return requests


SURFACES = {
    "explain": of_explain,
    "node tool": of_node_tool,
    "live records": of_live_records,
    "OTLP": of_otlp,
    "hub tool": of_hub_tool,
}


NESTED = frozenset({"cause", "cause_share", "late_ms", "max_late_ms"})
"""Fields of a row that the verdict of `explain` and of records has inside other fields."""

OWN_FORM = frozenset({"summary", "since", "until"})
"""Fields that a span has as its name and times; the hub's machines have wall clocks of their own."""


def essence(row: Row) -> str:
    """All fields of a verdict in one form: two digits of a number, null and empty values left out."""
    cost, causes, late = row.get("cost") or {}, row.get("causes"), row.get("late_ms")
    flat = {name: value for name, value in row.items() if name not in NESTED} | cost
    if causes is None:
        flat |= {name: row.get(name) for name in NESTED}
    else:
        first = causes[0] if causes else {}
        flat |= {"cause": first.get("cause"), "cause_share": first.get("share")}
        flat |= {"late_ms": late["median"], "max_late_ms": late["max"]} if late else {}
    names = [field.json_name for field in FIELDS if field.json_name not in OWN_FORM]
    return json.dumps(
        [(name, _rounded(flat[name])) for name in names if flat.get(name) not in (None, "", [])]
    )


def _rounded(value: object) -> object:
    return float(f"{value:.2g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_surfaces_report_the_same_verdicts(name, tmp_path):
    make, expected = SCENARIOS[name]
    trace = make()
    db = tmp_path / "trace.db"
    node.write(db, trace)
    verdicts = {surface: rows(db, trace) for surface, rows in SURFACES.items()}
    result = {surface: sorted(map(essence, rows)) for surface, rows in verdicts.items()}
    assert sorted((row["kind"], row["ranks"]) for row in verdicts["explain"]) == sorted(expected)
    assert {surface: rows for surface, rows in result.items() if rows != result["explain"]} == {}, result[
        "explain"
    ]
    answer, report = HUB_ANSWERS[db], diagnosed(node.read(db), Settings())
    assert (answer.answer, answer.n_rows_not_examined) == (report.answer.value, 0)
    if report.answer is not Answer.FOUND:
        assert answer.jobs[0].evidence["n_steps"] == report.evidence.n_steps
    assert {row["job"] for row in answer.rows} <= {job.job for job in answer.jobs}


def test_every_surface_has_every_field():
    names = {field.json_name for field in FIELDS}
    verdict = diagnosed(dp_trace(every(2, 7, 50 * MS)), Settings())
    (row,) = as_json(verdict)["verdicts"]
    flattened = {"cause", "cause_share", "max_late_ms"} | set(row["cost"])
    flattened |= {column(label) for label in GROUP_LABELS} if "owner" in row else set()
    assert names <= set(row) | flattened
