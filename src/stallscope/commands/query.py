"""`stallscope query`: SQL on a node trace."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.answer import Format, print_answer
from stallscope.commands.fleet import (
    CaCert,
    ClientCert,
    ClientKey,
    FleetOptions,
    Nodes,
    NoTls,
    TokenFile,
    access,
    is_fleet,
    missing_data,
    refuse_partial,
    tell,
)
from stallscope.commands.options import AsJson, Db, SettingsFile, check_output, duration_ns, settings_from
from stallscope.commands.part import From, Last, Phase, Since, Step, To, only_since, part_from
from stallscope.errors import BadInput

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.query.fanout import FleetAnswer
    from stallscope.query.sql import Limits
    from stallscope.settings import Settings

_EXAMPLE = "SELECT op_name(op), count(*) FROM collectives GROUP BY 1"
_MAX_NAME_BYTES = 255
"""Of a file (NAME_MAX): the system refuses to look for a longer name."""


def query(
    sql: Annotated[
        str | None, typer.Argument(help="One SELECT; omitted, or -: read from standard input.")
    ] = None,
    db: Db = None,
    since: Since = None,
    begin: From = None,
    end: To = None,
    step: Step = None,
    phase: Phase = None,
    last: Last = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows; a cut-off is reported.")] = 1000,
    timeout: Annotated[str, typer.Option(help="Time limit of the query: 10s, 2m.")] = "10s",
    form: Annotated[Format, typer.Option("--format", help="Output format of the rows.")] = Format.TABLE,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="List the tables, columns and functions.")] = False,
    nodes: Nodes = None,
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Query a trace with SQL (SQLite dialect, read-only).

    With --nodes, the exit code is 22 if nodes are missing, and --json prints an object with `rows` and `missing`.
    """
    from stallscope.query import sql as engine

    fleet = FleetOptions(nodes, token_file, ca_cert, client_cert, client_key, no_tls, timeout, True)
    chosen = settings_from({"db": db, **fleet.flags()}, settings)
    check_output(out, [chosen.db])
    form = Format.JSON if as_json else form
    if schema:
        _print_schema(chosen.db, form, out)
        return
    limits = engine.Limits(max_rows=limit, timeout_s=duration_ns(timeout, "--timeout") / 1e9)
    part = part_from(since, begin, end, step=step, phase=phase, last=last)
    if is_fleet(chosen, fleet, db):
        result = _of_nodes(_statement(sql), chosen, fleet, limits=limits, since_ns=only_since(part))
        print_answer(result.answer, form, out=out, missing=missing_data(result.failures))
        refuse_partial(result.failures, len(result.failures) + len(result.replies))
        return
    print_answer(engine.ask(chosen.db, _statement(sql), limits=limits, part=part), form, out=out)


def _of_nodes(
    statement: str, chosen: Settings, fleet: FleetOptions, *, limits: Limits, since_ns: int | None
) -> FleetAnswer:
    from stallscope.query.fanout import query as fan_out
    from stallscope.query.remote_nodes import addresses

    result = fan_out(
        statement, addresses(chosen.nodes), access(chosen, fleet), limits=limits, since_ns=since_ns
    )
    tell(result.failures, result.replies)
    return result


def _statement(sql: str | None) -> str:
    """The given SQL, or the SQL from standard input."""
    if sql is not None and sql != "-":
        if len(os.fsencode(sql)) <= _MAX_NAME_BYTES and Path(sql).exists():
            raise BadInput(f'{sql} is a file, not SQL; try `stallscope query --db {quote(sql)} "{_EXAMPLE}"`')
        return sql
    if sys.stdin.isatty():
        raise BadInput(f'no SQL given; try `stallscope query "{_EXAMPLE}"`, or --schema')
    return sys.stdin.read()


def _print_schema(db: Path, form: Format, out: Path | None) -> None:
    from stallscope.query import trace_schema
    from stallscope.query.sql import Answer
    from stallscope.query.sql_functions import FUNCTIONS

    columns = trace_schema.columns(db)
    if form is not Format.TABLE or out is not None:
        rows: list[tuple[object, ...]] = [(c.table, c.name, c.type, c.meaning) for c in columns]
        print_answer(Answer(("table", "column", "type", "meaning"), rows), form, out=out)
        return
    width = max(len(column.name) for column in columns)
    table = ""
    for column in columns:
        if column.table != table:
            blank = "\n" if table else ""
            table = column.table
            typer.echo(f"{blank}{table}: {trace_schema.about(table)}")
        typer.echo(f"  {column.name.ljust(width)}  {column.type.ljust(7)}  {column.meaning}".rstrip())
    typer.echo("\nfunctions, in addition to SQLite's:")
    width = max(map(len, FUNCTIONS))
    for name, meaning in FUNCTIONS.items():
        typer.echo(f"  {name.ljust(width)}  {meaning}")
