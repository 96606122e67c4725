"""The names that a user's SQL may use: the hub's tables, and names.toml, read once."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stallscope.store.hub import schema

FILE = Path(__file__).with_name("names.toml")


@dataclass(frozen=True)
class Names:
    """Allowed names, in lower case. refused: name -> reason. node_kinds: query nodes, FROM items, modifiers, orders.

    sized: functions whose second argument is the length of their result.
    """

    engine: str
    tables: frozenset[str]
    table_functions: frozenset[str]
    refused_table_functions: frozenset[str]
    functions: frozenset[str]
    refused: Mapping[str, str]
    refused_prefixes: tuple[str, ...]
    session_words: frozenset[str]
    sized: frozenset[str]
    node_kinds: frozenset[str]
    expressions: frozenset[str]


@cache
def allowed() -> Names:
    """The lists of names.toml."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    nodes = data["nodes"]
    return Names(
        engine=data["engine"],
        tables=frozenset(schema.TABLES),
        table_functions=_words(data["table_functions"]),
        refused_table_functions=_words(data["refused_table_functions"]),
        functions=_words(data["functions"]),
        refused={name: reason for reason, words in data["refused"].items() for name in words.split()},
        refused_prefixes=tuple(data["refused_prefixes"].split()),
        session_words=_words(data["session_words"]),
        sized=_words(data["sized"]),
        node_kinds=_words(" ".join(nodes[kind] for kind in ("query", "from", "modifier", "order"))),
        expressions=_words(nodes["expression"]),
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())
