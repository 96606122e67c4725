"""`stallscope hub status`: hubs that share their data, their slots and their lag."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from stallscope.commands.options import AsJson, SettingsFile, settings_from
from stallscope.errors import BadInput, StorageFailed

Shared = Annotated[
    str | None, typer.Option("--shared", help="PostgreSQL of the hubs: postgresql://USER@HOST:PORT/DATABASE.")
]


def status(shared: Shared = None, as_json: AsJson = False, settings: SettingsFile = None) -> None:
    """Show hubs that share their data: slots, owners, lag.

    The exit code is 4 if a slot has no owner.
    """
    chosen = settings_from({"hub_shared": shared}, settings)
    if not chosen.hub_shared:
        raise BadInput("hub status needs --shared, the PostgreSQL of the hubs")
    from stallscope.store.shared import postgres_schema
    from stallscope.store.shared.cluster_status import status as state_of
    from stallscope.store.shared.postgres import Postgres

    with closing(Postgres(chosen.hub_shared, name="stallscope-status")) as postgres:
        postgres.checked()
        postgres_schema.prepare(postgres)
        state = state_of(postgres, lease_s=chosen.hub_lease_s)
    if as_json:
        typer.echo(json.dumps(state))
    else:
        for hub in state["hubs"]:
            word = "leaving" if hub["is_leaving"] else "alive" if hub["is_alive"] else "silent"
            away_s = hub["bucket_away_s"]
            away = f"  the bucket has not answered it for {away_s:.0f} s" if away_s else ""
            typer.echo(
                f"{hub['name']:<48} {word:<8} {hub['n_slots']:>3} slots  last seen {hub['seen_s_ago']} s ago{away}"
            )
        busy = [slot for slot in state["slots"] if slot["unsealed_rows"]]
        for slot in busy:
            typer.echo(
                f"slot {slot['slot']:>2}  epoch {slot['epoch']:<6} {slot['unsealed_rows']:>12,} unsealed rows,"
                f" the oldest {slot['oldest_unsealed_s']:.0f} s  {slot['owner'] or 'no owner'}"
            )
        typer.echo(f"{state['sealed_files']:,} sealed files, {state['sealed_bytes']:,} bytes")
    if n_free := state["n_slots_without_owner"]:
        raise StorageFailed(f"{n_free} slots have no owner: their rows wait at the senders; start a hub")
