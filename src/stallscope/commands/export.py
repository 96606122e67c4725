"""`stallscope export`: a trace in the formats of other tools."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.fleet import (
    NODES_TIMEOUT,
    CaCert,
    ClientCert,
    ClientKey,
    FleetOptions,
    Nodes,
    NodesTimeout,
    NoTls,
    TokenFile,
    fleet_trace,
    is_fleet,
    refuse_partial,
)
from stallscope.commands.options import STDOUT, Db, SettingsFile, check_output, settings_from
from stallscope.commands.part import From, Last, Phase, Since, Step, To, only_since, part_from
from stallscope.errors import BadInput, writing
from stallscope.events.counted import counted
from stallscope.store import file_modes

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.settings import Settings
    from stallscope.store.time_range import Part


class ExportFormat(StrEnum):
    """Output formats."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    PARQUET = "parquet"
    CSV = "csv"


_ENDINGS = {ExportFormat.PERFETTO: ".pftrace", ExportFormat.CHROME: ".json"}


def export(
    form: Annotated[
        ExportFormat, typer.Option("--format", help="A timeline (perfetto, chrome) or tables.")
    ] = ExportFormat.PERFETTO,
    db: Db = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file; for tables the folder. Default: the trace's name, in this folder."
        ),
    ] = None,
    since: Since = None,
    begin: From = None,
    end: To = None,
    step: Step = None,
    phase: Phase = None,
    last: Last = None,
    nodes: Nodes = None,
    timeout: NodesTimeout = NODES_TIMEOUT,
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Write a trace for Perfetto, for Chrome, or as tables.

    Open it at ui.perfetto.dev or chrome://tracing.
    """
    fleet = FleetOptions(nodes, token_file, ca_cert, client_cert, client_key, no_tls, timeout)
    chosen = settings_from({"db": db, **fleet.flags()}, settings)
    part = part_from(since, begin, end, step=step, phase=phase, last=last)
    if is_fleet(chosen, fleet, db):
        with _trace_of_nodes(chosen, fleet, only_since(part)) as merged:
            _export(replace(chosen, db=merged), form, out, part_from(None, None, None, step=None, phase=None))
        return
    _export(chosen, form, out, part)


@contextmanager
def _trace_of_nodes(chosen: Settings, fleet: FleetOptions, since_ns: int | None) -> Iterator[Path]:
    """The traces of all nodes as one temporary file."""
    from stallscope.store import node

    with tempfile.TemporaryDirectory(prefix="stallscope-") as folder:
        merged = Path(folder) / "nodes.db"
        trace, failures = fleet_trace(chosen, fleet, since_ns)
        node.write(merged, trace)
        yield merged
        refuse_partial(failures, chosen.nodes.count(",") + 1)


def _export(chosen: Settings, form: ExportFormat, out: Path | None, part: Part) -> None:
    if form in _ENDINGS:
        target = Path("/dev/stdout") if out == STDOUT else out or Path(f"{chosen.db.stem}{_ENDINGS[form]}")
        check_output(target, [chosen.db])
        n_bytes = _write_timeline(chosen, form, target, part)
        typer.echo(f"{target}: {n_bytes:,} bytes; open it in https://ui.perfetto.dev", err=True)
        return
    if out == STDOUT:
        raise BadInput(f"--format {form} writes several files; name their folder with --out")
    folder = out or Path(f"{chosen.db.stem}-{form}")
    for path, n_rows in _write_tables(chosen.db, form, folder, part):
        typer.echo(f"{path}: {counted(n_rows, 'row')}", err=True)


def _write_timeline(chosen: Settings, form: ExportFormat, target: Path, part: Part) -> int:
    """Write the timeline. Returns its bytes."""
    from stallscope.commands.report import diagnosed
    from stallscope.exporters.chrome import chrome_json
    from stallscope.exporters.perfetto import perfetto_bytes
    from stallscope.exporters.timeline_builder import build_track_set
    from stallscope.store import node

    trace = node.read(chosen.db, part=part)
    timeline = build_track_set(trace, diagnosed(trace, chosen))
    pieces: Iterable[bytes] = (
        perfetto_bytes(timeline)
        if form is ExportFormat.PERFETTO
        else (text.encode() for text in chrome_json(timeline))
    )
    with _replacing(target) as new, new.open("wb") as file:
        return sum(file.write(each) for each in pieces)


def _write_tables(db: Path, form: ExportFormat, folder: Path, part: Part) -> Iterator[tuple[Path, int]]:
    """Write every table as a file in the folder. Yields each file with its number of rows."""
    from stallscope.exporters.tables import write_table
    from stallscope.query.sql import rows_by_table

    with writing(folder, "choose another path with --out"):
        folder.mkdir(parents=True, exist_ok=True)
    for table, columns, rows in rows_by_table(db, part):
        path = folder / f"{table}.{form}"
        with _replacing(path) as new:
            n_rows = write_table(new, columns, rows)
        yield path, n_rows


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file that replaces `target` when it is complete. Raises StorageFailed."""
    with writing(target, "choose another path with --out"), file_modes.replacing(target) as new:
        yield new
