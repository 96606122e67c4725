"""Runs one statement over the traces of several machines, as if all rows were in one trace.

DuckDB computes the second statement over the rows of all nodes, with SQLite's rules where the engines differ.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput, OverLimits, Unreachable, remedy_for_extra
from stallscope.events.trace import Trace
from stallscope.query.distributed_sql import NODE, PARTS, Split, split
from stallscope.query.remote_nodes import Access, Answers, Connection, Failure, Reply, ask_all
from stallscope.query.sql import Answer, Limits, ask
from stallscope.store import node as store

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NODE_ROWS = 1_000_000
"""The most rows that a node may send for the computation: a cut would make the answer wrong."""


@dataclass(frozen=True)
class FleetAnswer:
    """The rows, the nodes that did not answer, and the clocks of the nodes that did."""

    answer: Answer
    failures: list[Failure]
    replies: list[Reply[Any]]


def query(
    statement: str, nodes: Sequence[str], access: Access, *, limits: Limits, since_ns: int | None = None
) -> FleetAnswer:
    """Send one statement to all nodes. Raises BadInput, RefusedQuery, OverLimits; Unreachable if no node answers."""
    columns = _columns(statement)
    plan = split(statement)
    max_rows = limits.max_rows if plan.kind == "rows" else MAX_NODE_ROWS
    body = {
        "sql": plan.node_sql,
        "max_rows": max_rows,
        "since_ns": since_ns,
        "timeout_s": limits.timeout_s,
    }
    answers = ask_all(nodes, access, lambda connection: _node_answer(connection, body))
    if not answers.replies:
        raise Unreachable(
            f"no node answered: {'; '.join(f'{f.address}: {f.reason}' for f in answers.failures)}"
        )
    if plan.kind != "rows":
        _check_complete(answers)
    names = distinct_names(answers)
    rows = [_Rows.of(reply, names[reply.address]) for reply in answers.replies]
    answer = _combine(plan, rows, columns, limits=limits)
    return FleetAnswer(answer, answers.failures, list(answers.replies))


def _node_answer(connection: Connection, body: dict[str, object]) -> Any:
    return connection.post("/api/v1/node/query", body)


def _columns(statement: str) -> tuple[str, ...]:
    """The names of the answer's columns, as a single node returns them; raises for a wrong statement."""
    with tempfile.TemporaryDirectory(prefix="stallscope-") as folder:
        path = Path(folder) / "empty.db"
        store.write(path, Trace())
        return ask(path, statement).columns


def _check_complete(answers: "Answers[Any]") -> None:
    for reply in answers.replies:
        if reply.answer["is_cut"]:
            raise OverLimits(
                f"{reply.address} has more than {MAX_NODE_ROWS:,} rows to compute with: narrow the statement "
                "(WHERE, --since), or use count, sum, min, max and avg, which each node computes itself"
            )


def distinct_names(answers: "Answers[Any]") -> dict[str, str]:
    """The name of each node, by its address; equal names get the address appended."""
    n_uses = Counter(reply.name for reply in answers.replies)
    return {
        reply.address: reply.name if n_uses[reply.name] == 1 else f"{reply.name} ({reply.address})"
        for reply in answers.replies
    }


@dataclass(frozen=True)
class _Rows:
    """One node's rows. names: the names of the machines in its trace, by number."""

    name: str
    is_renamed: bool
    names: dict[int, str]
    columns: list[str]
    rows: list[list[Any]]
    is_cut: bool

    @classmethod
    def of(cls, reply: "Reply[Any]", name: str) -> "_Rows":
        message = reply.answer
        names = {int(number): str(text) for number, text in message["nodes"].items()}
        if name == reply.name and len(names) == 1:
            name = next(iter(names.values()))  # the name in the rows of its trace
        return cls(
            name,
            name not in (reply.name, *names.values()),
            names,
            message["columns"],
            message["rows"],
            bool(message["is_cut"]),
        )

    def node_name(self, value: Any) -> Any:
        """The name of a row's node, from its number in the trace or its name."""
        text = self.names.get(value, value) if isinstance(value, int) else value
        return self.name if self.is_renamed and len(self.names) == 1 else text


def _combine(plan: Split, rows: list[_Rows], columns: tuple[str, ...], *, limits: Limits) -> Answer:
    if plan.kind == "rows":
        return _concatenate(rows, columns, limits)
    if plan.kind == "sorted":
        return _sort(plan, rows, columns, limits=limits)
    parts = [
        [node_rows.node_name(v) if i in plan.node_columns else v for i, v in enumerate(row)]
        for node_rows in rows
        for row in node_rows.rows
    ]
    width = len(rows[0].columns)
    answers = _compute(plan.final_sql, [f"v{i}" for i in range(width)], parts, limits=limits)
    return Answer(columns, answers[: limits.max_rows], len(answers) > limits.max_rows)


def _with_node(node_rows: _Rows, row: list[Any], node_index: int | None) -> tuple[Any, ...]:
    """The row with the node's name in it."""
    if node_index is None:
        return (node_rows.name, *row)
    return (*row[:node_index], node_rows.node_name(row[node_index]), *row[node_index + 1 :])


def _node_index(columns: Sequence[str]) -> int | None:
    return list(columns).index(NODE) if NODE in columns else None


def _concatenate(rows: list[_Rows], columns: tuple[str, ...], limits: Limits) -> Answer:
    node_index = _node_index(columns)
    out = [_with_node(node_rows, row, node_index) for node_rows in rows for row in node_rows.rows]
    is_cut = any(node_rows.is_cut for node_rows in rows) or len(out) > limits.max_rows
    return Answer(columns if node_index is not None else (NODE, *columns), out[: limits.max_rows], is_cut)


def _sort(plan: Split, rows: list[_Rows], columns: tuple[str, ...], *, limits: Limits) -> Answer:
    """The order of all rows by their keys; the rows themselves stay in Python."""
    all_rows = [(node_rows, row) for node_rows in rows for row in node_rows.rows]
    keys = [[number, *row[len(row) - plan.n_keys :]] for number, (_, row) in enumerate(all_rows)]
    order = f"{plan.order}, number" if plan.order else "number"
    limit = f" LIMIT {plan.limit}" if plan.limit is not None else ""
    sql = f"SELECT number FROM {PARTS} ORDER BY {order}{limit} OFFSET {plan.offset}"
    answers = _compute(sql, ["number", *(f"key{i}" for i in range(plan.n_keys))], keys, limits=limits)
    node_index = _node_index(columns)
    chosen = [all_rows[number] for (number,) in answers]
    out = [
        _with_node(node_rows, row[: len(row) - plan.n_keys], node_index)
        for node_rows, row in chosen[: limits.max_rows]
    ]
    return Answer(columns if node_index is not None else (NODE, *columns), out, len(chosen) > limits.max_rows)


def _compute(sql: str, names: list[str], rows: list[list[Any]], *, limits: Limits) -> list[tuple[Any, ...]]:
    """The rows of the second statement."""
    try:
        import duckdb
    except ImportError:
        raise BadInput(f"--nodes needs the package duckdb: {remedy_for_extra('hub')}") from None
    with duckdb.connect(config={"enable_external_access": "false", "threads": "2"}) as db:
        db.execute("SET integer_division = true")
        db.register(PARTS, _table(names, rows))
        try:
            return [tuple(row) for row in db.execute(sql).fetchmany(limits.max_rows + 1)]
        except duckdb.Error as error:
            message = str(error).split("\n")[0].split(": ", 1)[-1]
            raise BadInput(f"SQL: over several nodes: {message}") from error


def _table(names: list[str], rows: list[list[Any]]) -> "pa.Table":
    """Columns of one type each. SQLite's types may differ from row to row; numbers then become floats."""
    import pyarrow as pa

    columns = {}
    for i, name in enumerate(names):
        values = [row[i] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1:
            values = [None if value is None else str(value) for value in values]
        columns[name] = pa.array(values, pa.int64() if not kinds else None)
    return pa.table(columns)
