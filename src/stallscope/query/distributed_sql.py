"""Splits one statement for several nodes: the statement for each node, and the computation over the nodes' rows.

The rows of FROM and WHERE belong to one node: process numbers, symbols and times have no meaning on another node.
So each node evaluates FROM, WHERE and every expression over one row. Operations over many rows (groups, order,
limits, distinct, windows) are computed here, over the rows of all nodes:

rows      no operation over many rows: the result is the concatenation of the nodes' rows
sorted    ORDER BY, LIMIT: each node returns its first rows with their sort keys
groups    counts, sums, minima, maxima, means: each node returns the partial aggregates of its groups
all       any other statement: each node returns the values of its rows

A statement with inner queries over many rows cannot be split, and is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from stallscope.errors import BadInput, RefusedQuery

NODE = "node"
"""The column with the node of a row; on several nodes it contains their names."""

PARTS = "parts"
"""Name of the table of the nodes' rows in the second statement."""

_OWN_AGGREGATES = ("median", "quantile_cont")
_NODE_FUNCTIONS = ("rank_of", "wall_time")
"""Functions whose first argument is the number of a node, as in the trace."""

_DIALECT = "sqlite"


@dataclass(frozen=True)
class Split:
    """A split statement. node_sql: for each node. final_sql: over PARTS (DuckDB's), empty for `rows`.

    node_columns: indexes, in the nodes' rows, of columns with names of nodes. n_keys: for `sorted`, the number of
    final columns that are keys, to which `order`, `limit` and `offset` apply.
    """

    kind: Literal["rows", "sorted", "groups", "all"]
    node_sql: str
    final_sql: str = ""
    node_columns: tuple[int, ...] = ()
    n_keys: int = 0
    order: str = ""
    limit: int | None = None
    offset: int = 0


def split(statement: str) -> Split:
    """The split of a statement. Raises BadInput unless it is a SELECT, RefusedQuery if it cannot be split."""
    select = _parse(statement)
    _check_inner(select)
    _resolve(select)
    if not _combines_rows(select):
        return Split("rows", _sql(_with_node_names(select)))
    if not (
        _aggregates(select) or _windows(select) or select.args.get("distinct") or select.args.get("group")
    ):
        return _split_sorted(select)
    if any(isinstance(p, exp.Star) or (isinstance(p, exp.Column) and p.is_star) for p in select.expressions):
        raise RefusedQuery("over several nodes `*` cannot be grouped: name the columns")
    if _has_mergeable_aggregates(select):
        return _split_groups(select)
    return _split_all(select)


def _parse(statement: str) -> exp.Select:
    try:
        statements = [
            expression for expression in sqlglot.parse(statement, read=_DIALECT) if expression is not None
        ]
    except SqlglotError as error:
        message = " ".join(str(error).split("\n")[0].split())
        raise BadInput(f"SQL: {message}") from error
    if len(statements) != 1:
        raise BadInput("give one SELECT" if statements else "the statement is empty: give one SELECT")
    if isinstance(statements[0], exp.SetOperation):
        raise RefusedQuery(
            "a UNION cannot be sent to several nodes: query its parts separately, or merge the traces first"
        )
    if not isinstance(statements[0], exp.Select):
        raise RefusedQuery("a query may only read: give one SELECT")
    return statements[0]


def _check_inner(select: exp.Select) -> None:
    """Refuse inner queries over many rows, because each node would answer them separately."""
    for inner in select.find_all(exp.Select, exp.SetOperation):
        if inner is select:
            continue
        combines_rows = isinstance(inner, exp.SetOperation) or _combines_rows(inner)
        if combines_rows:
            raise RefusedQuery(
                "each node would answer an inner query that groups, orders or limits separately: query in two "
                "steps, or merge the traces first (stallscope merge) and query the merged trace"
            )


def _resolve(select: exp.Select) -> None:
    """Replace column numbers and aliases in GROUP BY, HAVING and ORDER BY with their expressions."""
    aliases = {p.alias: p.this for p in select.expressions if isinstance(p, exp.Alias)}

    def without_alias(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Column) and not node.table and node.name in aliases:
            return aliases[node.name].copy()
        return node

    def without_number(node: exp.Expr) -> exp.Expr:
        if not (isinstance(node, exp.Literal) and node.is_int):
            return node.transform(without_alias)
        index = int(node.this) - 1
        if not 0 <= index < len(select.expressions):
            raise BadInput(f"SQL: GROUP BY or ORDER BY names column {index + 1}, which does not exist")
        return select.expressions[index].unalias().copy()

    if group := select.args.get("group"):
        group.set("expressions", [without_number(expression) for expression in group.expressions])
    if having := select.args.get("having"):
        having.set("this", having.this.transform(without_alias))
    if order := select.args.get("order"):
        for expression in order.expressions:
            expression.set("this", without_number(expression.this))


def _own_expressions(select: exp.Expr, *kinds: type[exp.Expr]) -> Iterator[exp.Expr]:
    """Expressions of these kinds in the statement itself, outside inner queries."""
    yield from (
        expression for expression in select.find_all(*kinds) if expression.find_ancestor(exp.Select) is select
    )


def _is_aggregate(node: exp.Expr) -> bool:
    is_ours = isinstance(node, exp.Anonymous) and node.name.lower() in _OWN_AGGREGATES
    # With several arguments SQLite's min and max are functions of one row.
    is_scalar = isinstance(node, exp.Min | exp.Max) and bool(node.expressions)
    return (isinstance(node, exp.AggFunc) or is_ours) and not is_scalar


def _aggregates(select: exp.Expr) -> list[exp.Expr]:
    return [expression for expression in _own_expressions(select, exp.Func) if _is_aggregate(expression)]


def _windows(select: exp.Expr) -> list[exp.Expr]:
    return list(_own_expressions(select, exp.Window))


def _combines_rows(select: exp.Expr) -> bool:
    words = ("group", "order", "limit", "offset", "distinct", "having")
    return any(select.args.get(word) for word in words) or bool(_aggregates(select) or _windows(select))


def _sql(select: exp.Expr, dialect: str = _DIALECT) -> str:
    return select.sql(dialect=dialect, normalize_functions=False)


def _with_node_names(select: exp.Select) -> exp.Select:
    """The statement with node names in place of node columns, so that WHERE node = 'a' works."""

    def name_node(node: exp.Expr) -> exp.Expr:
        if not isinstance(node, exp.Column) or node.name.lower() != NODE or node.is_star:
            return node
        if isinstance(node.parent, exp.Anonymous) and node.parent.name.lower() in _NODE_FUNCTIONS:
            return node
        if node.find_ancestor(exp.Join) or _is_of_nodes(node):
            return node
        name = exp.Anonymous(this="node_name", expressions=[node.copy()])
        return exp.alias_(name, NODE) if isinstance(node.parent, exp.Select) else name

    return select.copy().transform(name_node)  # type: ignore[return-value]


def _is_of_nodes(node: exp.Expr) -> bool:
    """Keep node numbers in a query over the table of nodes, whose subject they are."""
    select = node.find_ancestor(exp.Select)
    origin = select.args.get("from_") or select.args.get("from") if select else None
    return isinstance(origin, exp.From) and isinstance(origin.this, exp.Table) and origin.this.name == "nodes"


def _is_node_column(node: exp.Expr) -> bool:
    return isinstance(node, exp.Column) and node.name.lower() == NODE


def _literal_number(clause_expression: exp.Expr | None, clause: str) -> int | None:
    if clause_expression is None:
        return None
    literal = clause_expression.expression
    if not (isinstance(literal, exp.Literal) and literal.is_int):
        raise RefusedQuery(f"over several nodes {clause} has to be a number")
    return int(literal.this)


def _limit_and_offset(select: exp.Select) -> tuple[int | None, int]:
    """LIMIT and OFFSET."""
    return (
        _literal_number(select.args.get("limit"), "LIMIT"),
        _literal_number(select.args.get("offset"), "OFFSET") or 0,
    )


def _direction(expression: exp.Expr) -> str:
    """DESC and NULLS of a term of ORDER BY; SQLite sorts NULL as the smallest value."""
    is_down = bool(expression.args.get("desc"))
    first = expression.args.get("nulls_first")
    return f"{'DESC' if is_down else 'ASC'} NULLS {'FIRST' if first or (first is None and not is_down) else 'LAST'}"


def _split_sorted(select: exp.Select) -> Split:
    limit, offset = _limit_and_offset(select)
    order = select.args.get("order")
    terms = list(order.expressions) if order else []
    node_select = select.copy()
    node_select.set("offset", None)
    if limit is not None:
        node_select.set("limit", exp.Limit(expression=exp.Literal.number(limit + offset)))
    elif offset:
        node_select.set("limit", None)
    for i, term in enumerate(terms):
        node_select.append("expressions", exp.alias_(term.this.copy(), f"key{i}"))
    return Split(
        "sorted",
        _sql(_with_node_names(node_select)),
        n_keys=len(terms),
        order=", ".join(f"key{i} {_direction(term)}" for i, term in enumerate(terms)),
        limit=limit,
        offset=offset,
    )


@dataclass
class _Values:
    """Expressions that the nodes evaluate, without repetition, by the name of their column."""

    names: dict[str, str] = field(default_factory=dict)
    expressions: list[exp.Expr] = field(default_factory=list)

    def column(self, expression: exp.Expr) -> exp.Column:
        text = _sql(expression)
        if text not in self.names:
            self.names[text] = f"v{len(self.names)}"
            self.expressions.append(expression.copy())
        return exp.column(self.names[text])

    @property
    def node_columns(self) -> tuple[int, ...]:
        return tuple(i for i, expression in enumerate(self.expressions) if _is_node_column(expression))

    def node_select(
        self, select: exp.Select, *, group: list[exp.Expr] | None = None, is_distinct: bool = False
    ) -> str:
        """The statement for a node: these values of the rows that FROM and WHERE select."""
        node_select = select.copy()
        for word in ("group", "having", "order", "limit", "offset", "distinct", "windows", "qualify"):
            node_select.set(word, None)
        listed = [
            exp.alias_(expression.copy(), name)
            for expression, name in zip(self.expressions, self.names.values(), strict=True)
        ]
        node_select.set("expressions", listed or [exp.alias_(exp.Literal.number(1), "v0")])
        node_select.set("distinct", exp.Distinct() if is_distinct else None)
        if group:
            node_select.set("group", exp.Group(expressions=[expression.copy() for expression in group]))
        return _sql(_with_node_names(node_select))


def _final_statement(select: exp.Select, change: Callable[[exp.Expr], exp.Expr]) -> str:
    """The second statement, over the table of parts, with every term of the first statement changed."""
    final = exp.Select()
    names = [f"c{i}" for i in range(len(select.expressions))]
    final.set(
        "expressions",
        [exp.alias_(change(p.unalias()), name) for p, name in zip(select.expressions, names, strict=True)],
    )
    final.set("from_", exp.From(this=exp.to_table(PARTS)))
    if select.args.get("distinct"):
        final.set("distinct", exp.Distinct())
    text = ""
    if group := select.args.get("group"):
        text += " GROUP BY " + ", ".join(
            _sql(change(expression), "duckdb") for expression in group.expressions
        )
    if having := select.args.get("having"):
        text += " HAVING " + _sql(change(having.this), "duckdb")
    if order := select.args.get("order"):
        terms = [
            f"{_sql(change(expression.this), 'duckdb')} {_direction(expression)}"
            for expression in order.expressions
        ]
        text += " ORDER BY " + ", ".join(terms)
    limit, offset = _limit_and_offset(select)
    text += f" LIMIT {limit}" if limit is not None else ""
    text += f" OFFSET {offset}" if offset else ""
    return _sql(final, "duckdb") + text


def _has_mergeable_aggregates(select: exp.Select) -> bool:
    """Whether every term is a group key or an aggregate that sums of parts can compute."""
    if _windows(select) or not (_aggregates(select) or select.args.get("group")):
        return False
    for expression in _aggregates(select):
        is_plain = isinstance(expression, exp.Count | exp.Sum | exp.Min | exp.Max | exp.Avg)
        if (
            not is_plain
            or isinstance(expression.this, exp.Distinct)
            or isinstance(expression.parent, exp.Filter)
        ):
            return False
    return True


def _split_groups(select: exp.Select) -> Split:
    group = select.args.get("group")
    keys = list(group.expressions) if group else []
    values = _Values()
    columns = {_sql(key): values.column(key) for key in keys}

    def sums(expression: exp.Expr) -> exp.Expr:
        return exp.Sum(this=values.column(expression))

    def from_parts(node: exp.Expr) -> exp.Expr:
        """An aggregate, computed from its parts."""
        if isinstance(node, exp.Count):
            total = exp.Coalesce(this=sums(node), expressions=[exp.Literal.number(0)])
            return exp.cast(total, "BIGINT")
        if isinstance(node, exp.Avg):
            count = exp.Nullif(this=sums(exp.Count(this=node.this.copy())), expression=exp.Literal.number(0))
            return exp.cast(sums(exp.Sum(this=node.this.copy())), "DOUBLE") / count
        return type(node)(this=values.column(node))

    def change(node: exp.Expr) -> exp.Expr:
        def replace_term(expression: exp.Expr) -> exp.Expr:
            if _sql(expression) in columns:
                return columns[_sql(expression)].copy()
            return exp.paren(from_parts(expression)) if _is_aggregate(expression) else expression

        return node.copy().transform(replace_term)

    final = _final_statement(select, change)
    ungrouped = [
        c
        for c in sqlglot.parse_one(final, read="duckdb").find_all(exp.Column)
        if c.name not in values.names.values()
    ]
    if ungrouped:
        raise RefusedQuery(
            f"over several nodes {ungrouped[0].name} must be in GROUP BY or in an aggregate: "
            "its value differs from row to row"
        )
    return Split(
        "groups",
        values.node_select(select, group=keys),
        final,
        node_columns=values.node_columns,
    )


def _split_all(select: exp.Select) -> Split:
    values = _Values()

    def change(node: exp.Expr) -> exp.Expr:
        """Replace every largest expression over one row with a column."""
        combines_rows = _is_aggregate(node) or isinstance(node, exp.Window)
        combines_rows = combines_rows or any(
            _is_aggregate(expression) or isinstance(expression, exp.Window) for expression in node.walk()
        )
        if not combines_rows:
            return values.column(node) if any(node.find_all(exp.Column)) else node.copy()
        changed = node.copy()
        for name, child in list(changed.args.items()):
            if isinstance(child, list):
                changed.set(name, [change(c) if isinstance(c, exp.Expr) else c for c in child])
            elif isinstance(child, exp.Ordered | exp.Order | exp.Distinct | exp.WindowSpec | exp.Where):
                changed.set(name, change_terms(child))
            elif isinstance(child, exp.Expr) and not isinstance(child, exp.Identifier | exp.Star):
                changed.set(name, change(child))
        return changed

    def change_terms(node: exp.Expr) -> exp.Expr:
        """An expression around terms (ORDER BY of a window, DISTINCT): only the terms change."""
        changed = node.copy()
        for name, child in list(changed.args.items()):
            if isinstance(child, list):
                changed.set(
                    name,
                    [change_terms(c) if isinstance(c, exp.Ordered) else change(c) for c in child],
                )
            elif isinstance(child, exp.Expr):
                changed.set(name, change(child))
        return changed

    final = _final_statement(select, change)
    return Split(
        "all",
        values.node_select(select, is_distinct=not (_aggregates(select) or _windows(select))),
        final,
        node_columns=values.node_columns,
    )
