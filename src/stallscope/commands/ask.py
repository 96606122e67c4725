"""`stallscope ask`: the hub's tools from a shell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stallscope.commands.options import AsJson, CaFile, HubUrl, SettingsFile, TokenFile, settings_from
from stallscope.commands.terminal_text import echo_text
from stallscope.errors import BadInput, NotFound

if TYPE_CHECKING:  # importing it here would slow every command
    from pathlib import Path

    from stallscope.serve.client import HubClient

DEFAULT_HUB = "https://localhost:8081"


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
        echo_text(_text(answer))


def client_from(
    hub: str, token_file: Path | None, ca_cert: Path | None, *, settings: Path | None
) -> HubClient:
    """The client of a hub, with the token from the settings. Raises BadInput, NotFound."""
    from stallscope.serve.client import HubClient
    from stallscope.serve.tokens import token_in

    chosen = settings_from({"hub_token_file": token_file, "hub_ca_file": ca_cert}, settings)
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


def _text(answer: dict[str, Any]) -> str:
    """The answer as text: its summary, and its rows as a table without empty columns."""
    rows = answer.get("rows") or []
    if rows and isinstance(rows[0], list):
        rows = [dict(enumerate(row)) for row in rows]
        names: dict[Any, str] = dict(enumerate(answer["columns"]))
    else:
        names = {name: name for row in rows[:1] for name in row}
    shown = [key for key in names if any(row[key] not in (None, [], "") for row in rows)]
    table = [[names[key] for key in shown], *([_cell(row[key]) for key in shown] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(shown))]
    lines = [answer["summary"]] if "summary" in answer else []
    if rows:
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
    if not rows and not lines:
        lines.append("(no rows)")
    if answer.get("note"):
        lines.append(f"({answer['note']})")
    elif answer.get("truncated"):
        lines.append("(more rows exist)")
    if answer.get("next_cursor"):
        lines.append(f"(older rows: --param cursor={answer['next_cursor']})")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:120]
