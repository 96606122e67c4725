"""`stallscope hub publish`: Delta tables of the sealed files, for readers in other engines."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.hub_status import Shared
from stallscope.commands.hub_upkeep import BucketAddress
from stallscope.commands.options import AsJson, SettingsFile, duration_ns, settings_from
from stallscope.errors import BadInput, StallscopeError

if TYPE_CHECKING:
    from stallscope.store.shared.delta_tables import PublishedTable


def publish(
    shared: Shared = None,
    bucket: BucketAddress = None,
    every: Annotated[
        str | None, typer.Option(help="Repeat after this time, until Ctrl-C: 5min. Default: once.")
    ] = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Maintain a Delta table of the sealed files per tenant and table.

    The Delta tables are in the bucket, next to the files, which are not copied. Safe to repeat, and while hubs run.
    """
    chosen = settings_from({"hub_shared": shared, "hub_bucket": bucket}, settings)
    if not chosen.hub_shared or not chosen.hub_bucket:
        raise BadInput("hub publish needs --shared and --bucket")
    every_s = None if every is None else duration_ns(every, "--every") / 1e9
    from stallscope.store.shared import postgres_schema
    from stallscope.store.shared.bucket import Bucket
    from stallscope.store.shared.postgres import Postgres

    objects = Bucket(chosen.hub_bucket)
    with closing(Postgres(chosen.hub_shared, name="stallscope-publish")) as postgres:
        from stallscope.store.shared import delta_tables  # after the addresses: a package may be missing

        postgres.checked()
        objects.checked()
        postgres_schema.prepare(postgres)
        if every_s is None:
            _print(delta_tables.publish(postgres, objects), as_json=as_json)
            return
        while True:
            try:
                _print(delta_tables.publish(postgres, objects), as_json=as_json)
            except StallscopeError as error:  # PostgreSQL or the bucket is away: the next run completes it
                typer.echo(f"stallscope: {error}", err=True)
            time.sleep(every_s)


def _print(tables: list[PublishedTable], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(table) for table in tables]))
        return
    if not tables:
        typer.echo("no Delta table: the hubs have no sealed files yet", err=True)
    for table in tables:
        typer.echo(
            f"{table.address}  version {table.version}  {table.n_added:,} added, {table.n_removed:,} removed,"
            f" {table.n_files:,} files"
        )
