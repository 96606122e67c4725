"""`stallscope report cost`: the cost of stalls over a time, from a hub."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.ask import DEFAULT_HUB, client_from
from stallscope.commands.options import (
    STDOUT,
    CaFile,
    HubUrl,
    JobName,
    NamespaceName,
    OutputFile,
    OwnerName,
    SettingsFile,
    TokenFile,
    duration_ns,
)
from stallscope.errors import BadInput, StorageFailed
from stallscope.events.owner import SUM_LABELS
from stallscope.store import file_modes
from stallscope.terminal_text import echo_text

report_app = typer.Typer(
    help="Reports for cron and e-mail.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
FORMATS = ("text", "csv", "json", "html")
GROUPINGS = {
    name.replace("_", "-"): name for name in ("cluster", "rank", "rate_class", "gpu_model", *SUM_LABELS)
}


GOODPUT_GROUPINGS = {name.replace("_", "-"): name for name in ("job", *SUM_LABELS)}


@report_app.callback()
def reports() -> None:
    """Reports for cron and e-mail."""


@report_app.command()
def goodput(
    since: Annotated[str, typer.Option(help="The time to report on, until now: 12h, 1d, 30d.")] = "1d",
    by: Annotated[str, typer.Option(help=f"Grouping: {', '.join(GOODPUT_GROUPINGS)}.")] = "job",
    per_day: Annotated[bool, typer.Option("--per-day", help="One row per group and UTC day.")] = False,
    job: JobName = None,
    owner: OwnerName = None,
    namespace: NamespaceName = None,
    form: Annotated[str, typer.Option("--format", help="text, csv or json.")] = "text",
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    settings: SettingsFile = None,
) -> None:
    """Print productive and lost GPU time, by group and day."""
    from stallscope.commands import goodput_page

    check_format(form, goodput_page.FORMATS)
    if by not in GOODPUT_GROUPINGS:
        raise BadInput(f"--by {by}: choose from {', '.join(GOODPUT_GROUPINGS)}")
    window, chosen = _window_ms(since), _chosen(job, owner, namespace)
    client = client_from(hub, token_file, ca_cert, settings=settings)
    answer = client.ask(
        "fleet.cluster.goodput",
        window | chosen | {"by": GOODPUT_GROUPINGS[by], "per_day": per_day, "limit": 10_000},
    )
    typer.echo(goodput_page.FORMATS[form](answer), nl=False)


@report_app.command()
def cost(
    since: Annotated[str, typer.Option(help="The time to report on, until now: 12h, 1d, 30d.")] = "1d",
    by: Annotated[str, typer.Option(help=f"Groupings: {', '.join(GROUPINGS)}, or some of them.")] = "cluster",
    job: JobName = None,
    owner: OwnerName = None,
    namespace: NamespaceName = None,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "text",
    output: OutputFile = None,
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    settings: SettingsFile = None,
) -> None:
    """Print the GPU time and money lost to stalls, by group."""
    from stallscope.commands import cost_page

    check_format(form, FORMATS)
    names = [name.strip() for name in by.split(",")]
    if unknown := [name for name in names if name not in GROUPINGS]:
        raise BadInput(f"--by {unknown[0]}: choose from {', '.join(GROUPINGS)}")
    window, chosen = _window_ms(since), _chosen(job, owner, namespace)
    client = client_from(hub, token_file, ca_cert, settings=settings)
    answers = {
        GROUPINGS[name]: client.ask(
            "fleet.cluster.get_cost", window | chosen | {"by": GROUPINGS[name], "limit": 1000}
        )
        for name in names
    }
    first, last = (
        datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M") for ms in window.values()
    )
    title = f"Cost of GPU stalls, {first} to {last} UTC"
    title += "".join(f", {name} {value}" for name, value in chosen.items())
    rows = cost_page.rows_of(answers)
    text = {
        "text": lambda: cost_page.as_text(answers, title) + "\n",
        "csv": lambda: cost_page.as_csv(rows),
        "json": lambda: json.dumps({"title": title, "rows": rows}, indent=1) + "\n",
        "html": lambda: cost_page.as_html(answers, title),
    }[form]()
    print_or_write(text, output, is_fitted=form == "text")


def _chosen(job: str | None, owner: str | None, namespace: str | None) -> dict[str, str]:
    """The filters that were given."""
    given = {"job": job, "owner": owner, "namespace": namespace}
    return {name: value for name, value in given.items() if value}


def print_or_write(text: str, output: Path | None, *, is_fitted: bool) -> None:
    """Print a report, or write it to a file. Raises StorageFailed. is_fitted: fit its lines to a terminal."""
    if output == STDOUT:
        output = None
    if output is None and is_fitted:
        echo_text(text, newline=False)
        return
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        file_modes.replace(output, text.encode(), 0o644)
    except OSError as error:
        raise StorageFailed(f"{output} cannot be written ({error.strerror}); choose another file") from None


def check_format(form: str, formats: Collection[str]) -> None:
    """Raises BadInput for a --format that the report does not have."""
    if form not in formats:
        raise BadInput(f"--format {form}: choose one of {', '.join(formats)}")


def _window_ms(since: str) -> dict[str, int]:
    """The window until now, in ms since 1970."""
    now_ns = time.time_ns()
    return {"from": max(0, now_ns - duration_ns(since, "--since")) // 1_000_000, "to": now_ns // 1_000_000}
