"""`stallscope report job`: the post-mortem of one job, from a hub or from a node trace."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stallscope.commands.ask import DEFAULT_HUB, client_from
from stallscope.commands.options import CaFile, HubUrl, OutputFile, SettingsFile, TokenFile, settings_from
from stallscope.commands.report_cost import check_format, print_or_write
from stallscope.errors import BadInput

FORMATS = ("text", "json", "html")


def job(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Job of the hub, as `stallscope ask summary` lists it."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", help="Node trace or file of another tool instead of a hub; PATH@14:00..14:10 (UTC)."
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "text",
    output: OutputFile = None,
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    settings: SettingsFile = None,
) -> None:
    """Print the post-mortem of one job: timeline, incidents, cost."""
    from stallscope.commands import job_page, job_report
    from stallscope.commands.compare import report_of

    check_format(form, FORMATS)
    if (job_id is None) == (trace is None):
        raise BadInput("give the job of a hub (stallscope ask summary lists the jobs), or --trace PATH")
    if trace is not None:
        made = job_report.of_report(report_of(trace, settings_from({}, settings)), trace)
    else:
        made = job_report.of_hub(client_from(hub, token_file, ca_cert, settings=settings), job_id or "")
    text = {
        "text": lambda: job_report.as_text(made) + "\n",
        "json": lambda: json.dumps(made, indent=1) + "\n",
        "html": lambda: job_page.as_html(made),
    }[form]()
    print_or_write(text, output, is_fitted=form == "text")
