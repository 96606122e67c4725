"""`stallscope hub token`: the tokens of a hub's senders and readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, HubDb, SettingsFile, duration_ns, settings_from
from stallscope.errors import NotFound

if TYPE_CHECKING:
    from stallscope.serve.tokens import Tokens

token_app = typer.Typer(
    help="Create, list and revoke tokens, even while the hub runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@contextmanager
def _tokens(db: Path | None, settings: Path | None) -> Iterator[Tokens]:
    """The tokens, to read or change; of all hubs if the settings name a database that they share."""
    from stallscope.serve.tokens import FILE_NAME, Tokens

    chosen = settings_from({"hub_db": db}, settings)
    path = chosen.hub_db / FILE_NAME
    if not chosen.hub_shared:
        yield Tokens(path)
        return
    from stallscope.store.shared import postgres_schema
    from stallscope.store.shared.postgres import Postgres
    from stallscope.store.shared.shared_file import SharedFile

    with closing(Postgres(chosen.hub_shared, name="stallscope-token")) as postgres:
        postgres.checked()
        postgres_schema.prepare(postgres)
        with SharedFile(postgres, path).changing():
            yield Tokens(path)


@token_app.command()
def create(
    scope: Annotated[str, typer.Option(help="Permissions: ingest,read,sql,admin, or some of them.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose data it can send or read.")] = "default",
    expires: Annotated[str | None, typer.Option(help="Expires after this time: 12h, 90d.")] = None,
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Create a token. It is printed once, alone on the last line."""
    expires_s = None if expires is None else duration_ns(expires, "--expires") / 1e9
    with _tokens(db, settings) as tokens:
        token = tokens.create(scope.split(","), tenant, expires_in_s=expires_s)
    typer.echo(
        f"token {token.split('_')[1]} of tenant {tenant}; store it now, it is not shown again", err=True
    )
    typer.echo(token)


@token_app.command()
def accept(
    token_file: Annotated[Path, typer.Option("--token-file", help="File with the token.")],
    scope: Annotated[str, typer.Option(help="Permissions: ingest,read,sql,admin, or some of them.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose data it can send or read.")] = "default",
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Accept a token that was generated elsewhere, as a Secret.

    If the hub already knows the token, these scopes are added. A revoked token stays revoked.
    """
    from stallscope.serve.tokens import token_in

    with _tokens(db, settings) as tokens:
        token_id = tokens.accept(token_in(token_file), scope.split(","), tenant)
    typer.echo(f"token {token_id} of tenant {tenant} is accepted")


@token_app.command("list")
def list_(
    db: HubDb = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """List the tokens; their secrets are not stored anywhere."""
    import json
    import time

    now_s = time.time()
    with _tokens(db, settings) as tokens:
        entries = tokens.listed()
        if not entries and not tokens.path.parent.is_dir():
            raise NotFound(f"no hub in {tokens.path.parent}; give its folder with --db")
    if as_json:
        rows = [
            {
                "id": entry.id,
                "tenant": entry.tenant,
                "scopes": entry.scopes,
                "state": entry.state(now_s),
                "created_at": _utc(entry.created_at),
                "expires_at": _utc(entry.expires_at),
            }
            for entry in entries
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    line = "{:14}{:9}{:20}{:24}{:22}{}"
    typer.echo(line.format("ID", "STATE", "TENANT", "SCOPES", "CREATED", "EXPIRES"))
    for entry in entries:
        scopes, expires_at = ",".join(entry.scopes), _utc(entry.expires_at) or "never"
        created_at = _utc(entry.created_at)
        typer.echo(line.format(entry.id, entry.state(now_s), entry.tenant, scopes, created_at, expires_at))


@token_app.command()
def rotate(
    token_id: Annotated[str, typer.Argument(help="The token's id, as `token list` shows it.")],
    grace: Annotated[str, typer.Option(help="The old token expires after this time: 10min, 24h.")] = "24h",
    expires: Annotated[str | None, typer.Option(help="The new token expires after this time: 90d.")] = None,
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Replace a token by a new token of the same tenant and scopes.

    The new token is printed alone on the last line.
    """
    expires_s = None if expires is None else duration_ns(expires, "--expires") / 1e9
    with _tokens(db, settings) as tokens:
        token = tokens.rotate(token_id, grace_s=duration_ns(grace, "--grace") / 1e9, expires_in_s=expires_s)
    typer.echo(f"token {token_id} expires in {grace}; store the new token, it is not shown again", err=True)
    typer.echo(token)


@token_app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(help="The token's id, as `token list` shows it.")],
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Revoke a token; a running hub refuses it from the next request."""
    with _tokens(db, settings) as tokens:
        tokens.revoke(token_id)
    typer.echo(f"token {token_id} is revoked")


def _utc(at_s: int | None) -> str | None:
    import time

    return None if at_s is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
