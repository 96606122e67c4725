"""`stallscope alerts`: check and try the configuration of alerts; list, acknowledge and silence alerts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, SettingsFile, duration_ns, settings_from
from stallscope.errors import BadInput, NotFound

if TYPE_CHECKING:
    from stallscope.alerts.state import AlertState

alerts_app = typer.Typer(
    help="Check, test and manage alerts, even while the hub runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ConfigFile = Annotated[Path, typer.Argument(help="File with receivers and routes (docs/alerts.md).")]
StateDb = Annotated[
    Path | None,
    typer.Option("--db", help="The hub's folder, or a node trace (default: hub folder of the settings)."),
]
User = Annotated[str, typer.Option("--user", help="Your name, shown to other users (default: $USER).")]


def _state(db: Path | None, settings: Path | None) -> AlertState:
    from stallscope.alerts.state import AlertState, state_path

    path = state_path(db or settings_from({}, settings).hub_db)
    if not path.exists():
        raise NotFound(f"no alerts in {path}; give the hub's folder or the node trace with --db")
    return AlertState(path)


@alerts_app.command()
def check(config: ConfigFile) -> None:
    """Validate a configuration, and read its secrets."""
    from stallscope.alerts.config import Secret, load

    loaded = load(config)
    for name, receiver in loaded.receivers.items():
        for field, value in receiver:
            if isinstance(value, Secret):
                try:
                    value.value()
                except NotFound as error:
                    raise BadInput(f"{config}: receivers.{name}.{field}: {error}") from None
    typer.echo(f"{config}: {len(loaded.receivers)} receivers, {len(loaded.routes)} routes; valid")


@alerts_app.command()
def test(
    config: ConfigFile,
    since: Annotated[str, typer.Option(help="Replay the incidents of this time: 12h, 7d.")] = "7d",
    db: StateDb = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Print the alerts that a configuration would have sent. Sends nothing.

    Each incident counts with its last severity and cost.
    """
    import json
    import time
    from contextlib import closing

    from stallscope.alerts.config import load
    from stallscope.alerts.dry_run import planned
    from stallscope.events.clock_text import iso_utc

    loaded, now_ns = load(config), time.time_ns()
    with closing(_state(db, settings)) as state:
        begin_ns = now_ns - duration_ns(since, "--since")
        incidents, recorded_ns = state.incidents(begin_ns), state.recorded_since_ns()
    changes = planned(loaded, incidents, now_ns)
    if as_json:
        rows = [
            {
                "at": iso_utc(change.at_ns),
                "receiver": change.receiver,
                "change": change.change,
                "severity": change.notice.severity,
                "key": change.notice.key,
                "title": change.notice.title,
                "incidents": [member["verdict_id"] for member in change.notice.incidents],
            }
            for change in changes
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    for change in changes:
        at, notice = iso_utc(change.at_ns)[:19].replace("T", " "), change.notice
        typer.echo(f"{at}  {change.receiver:12}  {change.change:8}  {notice.severity:8}  {notice.title}")
    n_raised = sum(change.change == "raised" for change in changes)
    typer.echo(f"{n_raised} alerts from {len(incidents)} incidents of the last {since}")
    if recorded_ns > begin_ns:
        typer.echo(f"Incidents before {iso_utc(recorded_ns)[:19].replace('T', ' ')} UTC are not recorded.")


@alerts_app.command("list")
def list_(
    is_open: Annotated[bool, typer.Option("--open", help="Only alerts that are not resolved.")] = False,
    db: StateDb = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """List alerts, with failed deliveries, and the silences."""
    import json
    import time
    from contextlib import closing
    from dataclasses import asdict

    from stallscope.events.clock_text import iso_utc

    with closing(_state(db, settings)) as state:
        alerts, silences = state.listed(is_open=is_open), state.silences(time.time_ns())
    if as_json:
        typer.echo(json.dumps({"alerts": alerts, "silences": [asdict(each) for each in silences]}, indent=1))
        return
    for alert in alerts:
        user = f", acknowledged by {alert['acknowledged_by']}" if alert["acknowledged_by"] else ""
        failure = f"\n  not delivered: {alert['last_error']}" if alert["last_error"] else ""
        raised = iso_utc(alert["raised_ns"])[:19].replace("T", " ")
        typer.echo(
            f"{raised}  {alert['state']:8}  {alert['severity']:8}  {alert['receiver']}{user}\n"
            f"  {alert['key']}  {alert['title']}{failure}"
        )
    for each in silences:
        conditions = ", ".join(f"{name} {'|'.join(values)}" for name, values in each.match.items())
        comment = f" ({each.comment})" if each.comment else ""
        until = iso_utc(each.until_ns)[:19].replace("T", " ")
        typer.echo(f"silence {each.silence_id} until {until} by {each.made_by}: {conditions}{comment}")
    if not alerts and not silences:
        typer.echo("no alerts, no silences")


@alerts_app.command()
def acknowledge(
    key: Annotated[str, typer.Argument(help="The alert's key, as `alerts list` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Send updates again.")] = False,
    user: User = "",
    db: StateDb = None,
    settings: SettingsFile = None,
) -> None:
    """Stop updates of an alert. Its end and a higher severity are still sent."""
    import time
    from contextlib import closing

    with closing(_state(db, settings)) as state:
        if undo:
            state.end_acknowledgement(key)
        else:
            state.acknowledge(key, user or _user(), time.time_ns())
    typer.echo(f"{key} is {'no longer acknowledged' if undo else 'acknowledged'}")


@alerts_app.command()
def silence(
    duration: Annotated[str, typer.Option("--for", help="Duration: 30m, 2h, 7d.")],
    cluster: Annotated[list[str] | None, typer.Option(help="Clusters; * and ? match.")] = None,
    node: Annotated[list[str] | None, typer.Option(help="Machines; * and ? match.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Kinds of verdict.")] = None,
    severity: Annotated[list[str] | None, typer.Option(help="Severities.")] = None,
    job: Annotated[list[str] | None, typer.Option(help="Numbers or names of jobs; * and ? match.")] = None,
    owner: Annotated[
        list[str] | None, typer.Option(help="Users, accounts, workloads or units; * and ? match.")
    ] = None,
    namespace: Annotated[list[str] | None, typer.Option(help="Namespaces; * and ? match.")] = None,
    comment: Annotated[str, typer.Option(help="Reason, shown to other users.")] = "",
    user: User = "",
    db: StateDb = None,
    settings: SettingsFile = None,
) -> None:
    """Send no alerts about matching incidents for a given time."""
    import time
    from contextlib import closing

    from pydantic import ValidationError

    from stallscope.alerts.config import Match, first_complaint

    conditions = {"cluster": cluster, "node": node, "kind": kind, "severity": severity}
    conditions |= {"job": job, "owner": owner, "namespace": namespace}
    try:
        match = Match.model_validate({name: values for name, values in conditions.items() if values})
    except ValidationError as error:
        location, message = first_complaint(error)
        raise BadInput(f"--{location[0]}: {message}") from None
    until_ns = time.time_ns() + duration_ns(duration, "--for")
    with closing(_state(db, settings)) as state:
        made = state.silence(match, until_ns=until_ns, user=user or _user(), comment=comment)
    typer.echo(f"silence {made.silence_id} for {duration}")


@alerts_app.command()
def unsilence(
    silence_id: Annotated[str, typer.Argument(help="The silence, as `alerts list` shows it.")],
    db: StateDb = None,
    settings: SettingsFile = None,
) -> None:
    """End a silence."""
    from contextlib import closing

    with closing(_state(db, settings)) as state:
        state.end_silence(silence_id)
    typer.echo(f"silence {silence_id} has ended")


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
