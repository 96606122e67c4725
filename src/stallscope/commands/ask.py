"""`stallscope ask`: the hub's tools from a shell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stallscope.commands.options import AsJson, CaFile, HubUrl, SettingsFile, TokenFile, settings_from
from stallscope.errors import BadInput, NotFound
from stallscope.terminal_text import echo_text, terminal_width

if TYPE_CHECKING:  # importing it here would slow every command
    from pathlib import Path

    from stallscope.serve.client import HubClient

DEFAULT_HUB = "https://localhost:8081"

_EMPTY: tuple[Any, ...] = (None, [], "")


def ask(
    tool: Annotated[
        str | None,
        typer.Argument(
            help="The tool; its prefix fleet.cluster. may be omitted. Without a tool: list the tools."
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="An argument of the tool, NAME=VALUE; may be repeated."),
    ] = None,
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Call a tool of a hub: verdicts, late ranks, costs, or SQL.

    Without a tool, list the tools.
    """
    client = client_from(hub, token_file, ca_cert, settings=settings)
    tools = client.tools()
    if tool is None:
        for entry in tools:
            if as_json:
                typer.echo(json.dumps(entry))
            else:
                echo_text(f"{entry['name']}\n    {entry['description']}")
        return
    entry = _entry(tools, tool)
    answer = client.ask(entry["name"], arguments(param or [], entry["input_schema"]))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        echo_text(as_text(answer, terminal_width()))


def client_from(
    hub: str, token_file: Path | None, ca_cert: Path | None, *, settings: Path | None
) -> HubClient:
    """The client of a hub, with the token from the settings. Raises BadInput, NotFound."""
    from stallscope.serve.client import HubClient, check_url
    from stallscope.serve.tokens import token_in

    chosen = settings_from({"hub_token_file": token_file, "hub_ca_file": ca_cert}, settings)
    check_url(hub)
    if chosen.hub_token_file is None:
        raise BadInput(
            "the hub needs a token; give --token-file (stallscope hub token create prints a token)"
        )
    return HubClient(hub, token_in(chosen.hub_token_file), chosen.hub_ca_file)


def arguments(texts: list[str], schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments of NAME=VALUE texts: text if the schema wants text, otherwise JSON. Raises BadInput."""
    out: dict[str, Any] = {}
    for each in texts:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise BadInput(f"--param {each!r}: expected NAME=VALUE")
        if name in out:
            raise BadInput(f"--param {name} is given twice")
        out[name] = _value(text, schema.get("properties", {}).get(name, {}))
    return out


def _value(text: str, schema: dict[str, Any]) -> Any:
    kinds = {each.get("type") for each in schema.get("anyOf", [schema])}
    if kinds <= {"string", "null"} and "string" in kinds:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _entry(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    matches = [entry for entry in tools if name in (entry["name"], entry["name"].rsplit(".", 1)[-1])]
    if not matches:
        raise NotFound(f"unknown tool {name!r}; the tools are {', '.join(entry['name'] for entry in tools)}")
    return matches[0]


def as_text(answer: dict[str, Any], width: int | None = None) -> str:
    """An answer of a tool as text: its summary and its rows, without empty columns.

    width: columns of the terminal, None for a pipe or a file. Rows that a terminal is too narrow for are printed below
    each other, a field per line.
    """
    names, rows = _columns_and_rows(answer)
    lines = [answer["summary"]] if "summary" in answer else []
    if rows:
        table = _table([names, *([_cell(value) for value in row] for row in rows)])
        fits = width is None or max(map(len, table)) <= width
        lines += table if fits else _records(names, rows)
    elif not lines:
        lines.append("(no rows)")
    if answer.get("note"):
        lines.append(f"({answer['note']})")
    elif answer.get("truncated"):
        lines.append("(more rows exist)")
    if answer.get("next_cursor"):
        lines.append(f"(older rows: --param cursor={answer['next_cursor']})")
    return "\n".join(lines)


def _columns_and_rows(answer: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The columns that have a value, and the rows. Two columns of a query may have the same name."""
    rows: list[Any] = answer.get("rows") or []
    if not rows:
        return [], []
    names = list(rows[0]) if isinstance(rows[0], dict) else answer["columns"]
    values = [list(row.values()) if isinstance(row, dict) else row for row in rows]
    shown = [i for i in range(len(names)) if any(row[i] not in _EMPTY for row in values)]
    return [names[i] for i in shown], [[row[i] for i in shown] for row in values]


def _table(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _records(names: list[str], rows: list[list[Any]]) -> list[str]:
    """Each row as a block: its summary or its number, then a line per field that has a value."""
    width = max(map(len, names))
    lines = []
    for number, row in enumerate(rows, 1):
        fields = [(name, value) for name, value in zip(names, row, strict=True) if value not in _EMPTY]
        title = next((str(value) for name, value in fields if name == "summary"), f"{number}.")
        lines += ["", title]
        for name, value in fields:
            if name != "summary":
                first, *others = _sentences(value)
                lines.append(f"  {name.ljust(width)}  {first}")
                lines += [f"  {' ' * width}  {other}" for other in others]
    return lines


def _sentences(value: Any) -> list[str]:
    """The lines of a field: one for each sentence of a list of sentences, such as the advice, otherwise one."""
    if isinstance(value, list) and all(isinstance(each, str) and " " in each for each in value):
        return [_cell(each, max_length=None) for each in value]
    return [_cell(value, max_length=None)]


def _cell(value: Any, max_length: int | None = 120) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        value = ", ".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:max_length]
