"""Checks that an SQL text only reads a tenant's tables.

The engine's own parser must find exactly one SELECT (or a plain EXPLAIN of one). Every node of the syntax tree must
be of a known kind, and every table, table function and function must be on the list. A statement of type SELECT may
still write (a CTE with INSERT, a table function such as checkpoint()): only the tree shows it. The check runs in the
worker, because a malicious text can crash the parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput, RefusedQuery
from stallscope.serve.sql.allowed_names import Names
from stallscope.store.hub.statement_bounds import TREE

if TYPE_CHECKING:  # importing the engine here would load it in every serving process
    import duckdb

MAX_SQL_BYTES = 64_000
MAX_NODES = 5_000
MAX_BRACKETS = 200
MAX_MADE = 10_000
"""Longest result, in characters or elements, that a function may be asked to create."""


@dataclass(frozen=True)
class AllowedStatement:
    """A text that may run. tables: the tables that it reads. parameters: names of its $parameters. tree: its syntax."""

    sql: str
    tables: frozenset[str]
    parameters: frozenset[str]
    tree: Any


@dataclass
class _Walk:
    """State of a walk through the tree. aliases: names that the text itself defines."""

    names: Names
    aliases: frozenset[str]
    tables: set[str] = field(default_factory=set)
    n_nodes: int = 0


def admitted(sql: str, connection: duckdb.DuckDBPyConnection, *, names: Names) -> AllowedStatement:
    """The admitted text. Raises RefusedQuery with the reason, and BadInput for invalid SQL."""
    _check_text(sql)
    kind, parameters = _only_statement(sql, connection)
    query = sql
    if kind == "EXPLAIN":
        query = _explained(sql)
        kind, parameters = _only_statement(query, connection, within="EXPLAIN")
    if kind == "MULTI":
        raise RefusedQuery("a PIVOT must list its values: PIVOT events ON op IN ('a', 'b') USING ...")
    if kind != "SELECT":
        raise RefusedQuery(f"{_readable(kind)} is not allowed; use one SELECT, or EXPLAIN of one SELECT")
    tree = _tree(query, connection)
    walk = _walked(tree, names)
    return AllowedStatement(sql, frozenset(walk.tables), parameters, tree)


def _check_text(sql: str) -> None:
    """Checks of the text before parsing; deep nesting would crash the process."""
    if not sql.strip():
        raise BadInput("the SQL is empty; give one SELECT")
    if len(sql.encode("utf-8", "replace")) > MAX_SQL_BYTES:
        raise RefusedQuery(f"the SQL is longer than {MAX_SQL_BYTES:,} bytes; split the query")
    if not sql.isprintable() and any(_is_odd(character) for character in sql):
        raise RefusedQuery("the SQL contains an unprintable character; remove it")
    depth = deepest = 0
    for character in sql:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > MAX_BRACKETS:
        raise RefusedQuery(f"parentheses nested more than {MAX_BRACKETS} levels deep; simplify the query")


def _is_odd(character: str) -> bool:
    return not character.isprintable() and character not in "\t\n\r\f\v" and not character.isspace()


def _only_statement(
    sql: str, connection: duckdb.DuckDBPyConnection, *, within: str = ""
) -> tuple[str, frozenset[str]]:
    """The type of the statement and its parameters. Raises for more than one statement."""
    import duckdb

    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        if within:
            raise RefusedQuery(
                "only a plain EXPLAIN of a SELECT is allowed: without ANALYZE and options"
            ) from None
        raise BadInput(f"invalid SQL: {_first_line(error)}") from None
    if len(statements) != 1:
        raise RefusedQuery(f"the text has {len(statements)} statements; give exactly one SELECT")
    return statements[0].type.name, frozenset(statements[0].named_parameters)


def _explained(sql: str) -> str:
    """The text after the word EXPLAIN, by the engine's own tokenizer."""
    import duckdb

    text = sql.encode()
    starts = [at for at, kind in duckdb.tokenize(sql) if kind != duckdb.token_type.comment]
    begin = starts[0] + len("EXPLAIN")
    if text[starts[0] : begin].upper() != b"EXPLAIN":
        raise RefusedQuery("only a plain EXPLAIN of a SELECT is allowed")
    return text[begin:].decode()


def _tree(query: str, connection: duckdb.DuckDBPyConnection) -> Any:
    row = connection.execute(TREE, [query]).fetchone()
    try:
        tree: dict[str, Any] = json.loads(row[0]) if row else {"error": True}
    except RecursionError:
        raise RefusedQuery("the SQL is nested too deeply; simplify the query") from None
    if tree.get("error") or len(tree["statements"]) != 1:
        raise RefusedQuery("the statement is not a plain SELECT")
    return tree["statements"][0]


def _walked(tree: Any, names: Names) -> _Walk:
    try:
        walk = _Walk(names, frozenset(_aliases(tree)))
        _visit(tree, walk, frozenset())
    except RecursionError:
        raise RefusedQuery("the SQL is nested too deeply; simplify the query") from None
    return walk


def _aliases(node: Any) -> set[str]:
    """Every column or table name that the text itself defines."""
    if isinstance(node, list):
        return set().union(*(_aliases(each) for each in node)) if node else set()
    if not isinstance(node, dict):
        return set()
    aliases = {str(node["alias"]).lower()} if "alias" in node else set()
    for key in ("column_name_alias", "aliases"):
        aliases |= {str(name).lower() for name in node.get(key) or () if isinstance(name, str)}
    return aliases.union(*(_aliases(value) for value in node.values()))


def _visit(node: Any, walk: _Walk, ctes: frozenset[str]) -> None:
    """Check a part of the tree. ctes: the common table expressions in scope."""
    if isinstance(node, list):
        for each in node:
            _visit(each, walk, ctes)
        return
    if not isinstance(node, dict):
        return
    walk.n_nodes += 1
    if walk.n_nodes > MAX_NODES:
        raise RefusedQuery(f"the SQL has more than {MAX_NODES:,} parts; split the query")
    _check_kind(node, walk.names)
    if "cte_map" in node:
        ctes = _with_ctes(node, walk, ctes)
    if node.get("type") == "BASE_TABLE":
        _check_table(node, walk, ctes)
    elif node.get("type") == "TABLE_FUNCTION":
        _check_table_function(node["function"], walk, ctes)
    elif node.get("type") == "SHOW_REF" and not node.get("query"):
        raise RefusedQuery("SHOW is not allowed; DESCRIBE events lists its columns")
    elif "function_name" in node:
        _check_function(node, walk.names)
    elif node.get("type") == "COLUMN_REF":
        _check_column(node, walk)
    for key, value in node.items():
        if key != "cte_map" and not (key == "function" and node.get("type") == "TABLE_FUNCTION"):
            _visit(value, walk, ctes)


def _check_kind(node: Mapping[str, Any], names: Names) -> None:
    """Check a node's kind: the `class` of an expression, the `type` of any other node."""
    kind, known = node.get("class", node.get("type")), names.node_kinds
    if "class" in node:
        known = names.expressions
    if isinstance(kind, str) and kind not in known:
        raise RefusedQuery(f"{_readable(kind)} is not allowed; the SQL may only read")
    if "function_name" in node and node.get("class") not in ("FUNCTION", "WINDOW"):
        raise RefusedQuery(f"{node['function_name']} is not allowed")
    if node.get("at_clause"):
        raise RefusedQuery("AT is not allowed; each table has only one version")


def _with_ctes(node: Mapping[str, Any], walk: _Walk, ctes: frozenset[str]) -> frozenset[str]:
    """Check the node's CTEs: each sees the CTEs before it, a recursive CTE also itself."""
    for entry in node["cte_map"].get("map") or ():
        name, body = str(entry["key"]).lower(), entry["value"]
        query = body.get("query_node") or body.get("query", {}).get("node") or {}
        sees_itself = query.get("type") == "RECURSIVE_CTE_NODE"
        _visit(body, walk, ctes | {name} if sees_itself else ctes)
        ctes = ctes | {name}
    return ctes


def _check_table(node: Mapping[str, Any], walk: _Walk, ctes: frozenset[str]) -> None:
    path = tuple(str(part).lower() for part in node["qualified_name"]["path"])
    if path[-1] in ctes and path[:-1] in ((), ("recurring",)):
        return
    if path[-1] not in walk.names.tables or path[:-1] not in ((), ("main",)):
        there = ", ".join(sorted(walk.names.tables))
        raise RefusedQuery(f"table {'.'.join(path)[:80]!r} does not exist; the tables are {there}")
    walk.tables.add(path[-1])


def _check_table_function(function: Mapping[str, Any], walk: _Walk, ctes: frozenset[str]) -> None:
    path = [str(part).lower() for part in function["qualified_name"]["path"]]
    if path[-1] not in walk.names.table_functions or len(path) != 1:
        raise RefusedQuery(
            f"{'.'.join(path)[:80]} is not allowed in FROM; the functions allowed there are "
            f"{', '.join(sorted(walk.names.table_functions))}"
        )
    for key, value in function.items():
        if key != "function_name":
            _visit(value, walk, ctes)


def _check_function(node: Mapping[str, Any], names: Names) -> None:
    """Check a function by its name, without a prefix: `x.lower()` is lower(x)."""
    path = [str(part).lower() for part in node.get("qualified_name", {}).get("path", [node["function_name"]])]
    name = path[-1]
    if name != str(node["function_name"]).lower() or len(path) > 2:
        raise RefusedQuery(f"{'.'.join(path)[:80]} is not allowed; call functions without a prefix")
    if name in names.sized and not _is_small(node):
        raise RefusedQuery(f"{name} needs a literal length of at most {MAX_MADE:,}")
    if name in names.functions:
        return
    reason = names.refused.get(name) or (
        "is reserved for the engine" if name.startswith(names.refused_prefixes) else "is not on the list"
    )
    raise RefusedQuery(f"the function {name[:80]} is not allowed: it {reason}")


def _is_small(node: Mapping[str, Any]) -> bool:
    arguments = [each.get("expression", {}) for each in node.get("arguments", ())]
    literal = arguments[1].get("literal", {}) if len(arguments) > 1 else {"kind": "INTEGER", "text": "0"}
    digits = str(literal.get("text", ""))
    return (
        literal.get("kind") == "INTEGER" and digits.isdigit() and len(digits) < 7 and int(digits) <= MAX_MADE
    )


def _check_column(node: Mapping[str, Any], walk: _Walk) -> None:
    path = [str(part).lower() for part in node["column_names"]]
    if len(path) == 1 and path[0] in walk.names.session_words and path[0] not in walk.aliases:
        raise RefusedQuery(f"{path[0]} is not allowed: it reveals the session")


def _readable(kind: str) -> str:
    return kind.replace("_", " ").lower()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0][:300]
