"""The rows of each table that a SELECT can use, from the conditions on ts_ns and cluster_id in its WHERE clauses.

A table has bounds only where it is the only table of a FROM clause, and where the condition compares the column with
a value that is known before the query runs. Everything else has no bounds, so the result can only be too wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any

from stallscope.store.hub.row_bounds import ALL_ROWS, NO_ROWS, RowBounds, between

TREE = "SELECT json_serialize_sql($1::VARCHAR, skip_null := true, skip_empty := true)"
"""Query for the syntax tree of a statement, as JSON."""

_MARGIN_NS = 10_000
"""The engine may compare times as DOUBLE, which distinguishes 256 ns in this century."""

_NOW_MARGIN_NS = 10**9
_MAX_NUMBER = 1e30
_COMPARISONS = {
    "COMPARE_EQUAL": "==",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<",
}
_FLIPPED = {"==": "==", ">": "<", "<": ">"}
_INTEGERS = {"BIGINT", "HUGEINT", "INTEGER", "UBIGINT"}
_NOW = {"now", "current_timestamp", "get_current_timestamp", "transaction_timestamp"}
_UNITS_NS = {
    "to_milliseconds": 10**6,
    "to_seconds": 10**9,
    "to_minutes": 60 * 10**9,
    "to_hours": 3600 * 10**9,
}
_UNITS_NS["to_days"] = 86_400 * 10**9  # the engine's time zone is UTC

_Interval = tuple[Fraction, Fraction]


@dataclass(frozen=True)
class _Known:
    """Values that are known before the query runs. now: contains the value of now()."""

    params: Mapping[str, Any]
    now: _Interval


@dataclass
class _Tables:
    known: _Known
    bounds: dict[str, RowBounds] = field(default_factory=dict)

    def note(self, table: Mapping[str, Any], bounds: RowBounds) -> None:
        name = str(table["table_name"]).lower()
        self.bounds[name] = self.bounds.get(name, NO_ROWS).either(bounds)


def statement_bounds(
    tree: Any, params: Mapping[str, Any], *, now_ns: int, within_s: float
) -> dict[str, RowBounds]:
    """By table, the rows that the statement can use; a table that is not in the result has no bounds.

    tree: by TREE. within_s: the statement starts at most this time after now_ns.
    """
    now = Fraction(now_ns - _NOW_MARGIN_NS), Fraction(now_ns + int(within_s * 1e9) + _NOW_MARGIN_NS)
    tables = _Tables(_Known(params, now))
    try:
        _visit(tree, tables)
    except RecursionError:
        return {}
    return tables.bounds


def _visit(node: Any, tables: _Tables) -> None:
    if isinstance(node, list):
        for each in node:
            _visit(each, tables)
        return
    if not isinstance(node, dict):
        return
    if node.get("type") == "BASE_TABLE":
        tables.note(node, ALL_ROWS)
    is_bounded = _has_one_table(node)
    if is_bounded:
        table = node["from_table"]
        where = _Where(str(table.get("alias") or table["table_name"]).lower(), tables.known)
        tables.note(table, where.bounds(node["where_clause"]))
    for key, value in node.items():
        if not (is_bounded and key == "from_table"):
            _visit(value, tables)


def _has_one_table(node: Mapping[str, Any]) -> bool:
    """Whether a node is a SELECT of one table with a WHERE clause, whose columns have their own names."""
    table = node.get("from_table")
    if node.get("type") != "SELECT_NODE" or not isinstance(table, dict) or "where_clause" not in node:
        return False
    is_plain = table.get("type") == "BASE_TABLE" and not table.keys() & {"column_name_alias", "sample"}
    aliases = {str(each.get("alias", "")).lower() for each in node.get("select_list", ())}
    return is_plain and "sample" not in node and not aliases & {"ts_ns", "cluster_id"}


@dataclass(frozen=True)
class _Where:
    """The conditions of one SELECT. name: of its table in the statement."""

    name: str
    known: _Known

    def bounds(self, node: Mapping[str, Any]) -> RowBounds:
        kind, children = str(node.get("type")), node.get("children", ())
        if kind == "CONJUNCTION_AND":
            return reduce(RowBounds.both, map(self.bounds, children), ALL_ROWS)
        if kind == "CONJUNCTION_OR":
            return reduce(RowBounds.either, map(self.bounds, children), NO_ROWS)
        if kind in _COMPARISONS:
            left, right = node["left"], node["right"]
            operator = _COMPARISONS[kind]
            return self._compared(left, operator, right).both(self._compared(right, _FLIPPED[operator], left))
        if kind == "COMPARE_BETWEEN":
            column = node["input"]
            return self._compared(column, ">", node["lower"]).both(self._compared(column, "<", node["upper"]))
        if kind == "COMPARE_IN":
            column, *values = children
            each = (self._compared(column, "==", value) for value in values)
            return reduce(RowBounds.either, each, NO_ROWS)
        if kind == "OPERATOR_IS_NULL" and self._is_a_value(children[0]):
            return NO_ROWS
        return ALL_ROWS

    def _compared(self, column: Mapping[str, Any], operator: str, value: Mapping[str, Any]) -> RowBounds:
        name = self._column(column)
        if name == "cluster_id" and operator == "==":
            text = self._text(value)
            return ALL_ROWS if text is None else RowBounds(clusters=frozenset({text}))
        if name != "ts_ns" or (interval := _number(value, self.known)) is None:
            return ALL_ROWS
        first, last = math.floor(interval[0]) - _MARGIN_NS, math.ceil(interval[1]) + _MARGIN_NS
        return between(None if operator == "<" else first, None if operator == ">" else last)

    def _column(self, node: Mapping[str, Any]) -> str:
        """The name of a column of the table; "" for another expression."""
        if node.get("type") != "COLUMN_REF":
            return ""
        path = [str(part).lower() for part in node["column_names"]]
        is_own = len(path) == 1 or (len(path) == 2 and path[0] == self.name)
        return path[-1] if is_own else ""

    def _text(self, node: Mapping[str, Any]) -> str | None:
        value = _value(node, self.known)
        return value if isinstance(value, str) else None

    def _is_a_value(self, node: Mapping[str, Any]) -> bool:
        if node.get("type") == "OPERATOR_CAST":
            return not node.get("try_cast") and self._is_a_value(node["child"])
        return _value(node, self.known) is not None


def _value(node: Mapping[str, Any], known: _Known) -> Any:
    """The value of a literal or a parameter, a text also with a cast to VARCHAR; None if it is unknown."""
    kind, literal = node.get("type"), node.get("literal", {})
    if kind == "VALUE_PARAMETER":
        return known.params.get(str(node.get("identifier")))
    if kind == "VALUE_CONSTANT":
        return literal.get("text") if literal.get("kind") == "STRING" else _literal_number(literal)
    if kind == "OPERATOR_CAST" and node["type_expr"].get("type_name") == "VARCHAR":
        value = _value(node["child"], known)
        return value if isinstance(value, str) else None
    return None


def _literal_number(literal: Mapping[str, Any]) -> int | float | None:
    text = str(literal.get("text", "")).replace("_", "")
    try:
        if literal.get("kind") == "INTEGER":
            return int(text)
        return float(text) if literal.get("kind") == "NUMERIC" else None
    except ValueError:
        return None


def _number(node: Mapping[str, Any], known: _Known) -> _Interval | None:
    """The interval that contains the value of an expression; None if it is unknown."""
    kind = node.get("type")
    if kind in ("VALUE_PARAMETER", "VALUE_CONSTANT"):
        return _point(_value(node, known))
    if kind == "OPERATOR_CAST" and node["type_expr"].get("type_name") in _INTEGERS:
        return _number(node["child"], known)
    if kind != "FUNCTION":
        return None
    name, arguments = str(node.get("function_name")).lower(), _arguments(node)
    if name == "epoch_ns" and len(arguments) == 1:
        return _moment(arguments[0], known)
    numbers = [_number(each, known) for each in arguments]
    return _computed(name, [each for each in numbers if each is not None]) if all(numbers) else None


def _moment(node: Mapping[str, Any], known: _Known) -> _Interval | None:
    """The interval that contains a time, in ns since 1970; None if it is unknown."""
    if node.get("type") == "COLUMN_REF":
        return (
            known.now
            if [str(part).lower() for part in node["column_names"]] == ["current_timestamp"]
            else None
        )
    if node.get("type") != "FUNCTION":
        return None
    name, arguments = str(node.get("function_name")).lower(), _arguments(node)
    if name in _NOW and not arguments:
        return known.now
    if name not in ("+", "-") or len(arguments) != 2:
        return None
    moment, duration = _moment(arguments[0], known), _duration(arguments[1], known)
    return _computed(name, [moment, duration]) if moment and duration else None


def _duration(node: Mapping[str, Any], known: _Known) -> _Interval | None:
    """The interval that contains `INTERVAL n UNIT`, in ns; None if it is unknown."""
    unit_ns = _UNITS_NS.get(str(node.get("function_name")).lower())
    arguments = _arguments(node)
    if unit_ns is None or len(arguments) != 1:
        return None
    inner = arguments[0]
    while inner.get("type") == "OPERATOR_CAST" or inner.get("function_name") == "trunc":
        inner = inner["child"] if "child" in inner else _arguments(inner)[0]
    number = _number(inner, known)
    if number is None or any(each.denominator != 1 for each in number):
        return None
    return number[0] * unit_ns, number[1] * unit_ns


def _computed(name: str, of: list[_Interval]) -> _Interval | None:
    if name == "-" and len(of) == 1:
        return -of[0][1], -of[0][0]
    if len(of) != 2:
        return None
    (a, b), (c, d) = of
    if name == "+":
        return a + c, b + d
    if name == "-":
        return a - d, b - c
    if name == "*":
        products = [a * c, a * d, b * c, b * d]
        return min(products), max(products)
    return None


def _arguments(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each.get("expression", {}) for each in node.get("arguments", ())]


def _point(value: object) -> _Interval | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        return None
    number = Fraction(value)
    return number, number
