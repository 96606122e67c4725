"""`stallscope check`: checks whether this machine can be traced."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, Db, SettingsFile
from stallscope.terminal_text import fitted

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.check.finding import Finding


def check(
    db: Db = None,
    hub: Annotated[
        str | None, typer.Option("--hub", help="Also check that this hub answers, HOST:PORT.")
    ] = None,
    as_json: AsJson = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Write a support bundle to this file (tar.gz).")
    ] = None,
    with_host_names: Annotated[
        bool, typer.Option("--with-host-names", help="Keep host and user names in the bundle.")
    ] = False,
    settings: SettingsFile = None,
) -> None:
    """Report whether this machine is ready to be traced.

    The exit code is 5 if a check fails.
    """
    from stallscope.check import bundle as bundling
    from stallscope.check import readiness
    from stallscope.settings import effective

    chosen = effective({"db": db, "hub": hub}, os.environ, settings)
    findings = []
    show = None if as_json else _Lines()
    for finding in readiness.findings(chosen.settings):
        findings.append(finding)
        if show is not None:
            show(finding)
    answer = readiness.as_json(findings)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    if bundle is not None:
        files = bundling.write(bundle, answer, chosen, with_names=with_host_names)
        typer.echo(f"{bundle}: {', '.join(files)}; review it before you send it", err=True)
    if not readiness.is_ready(findings):
        raise typer.Exit(5)


class _Lines:
    """Prints each finding as it arrives, in colour on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._width = self._console.width if self._console.is_terminal else sys.maxsize

    def __call__(self, finding: Finding) -> None:
        from rich.text import Text

        style = {"pass": "green", "warn": "yellow", "fail": "bold red"}[finding.state]
        line = Text(fitted(f"{finding.state.value}  {finding.subject:<14}  {finding.found}", self._width))
        line.stylize(style, 0, len(finding.state.value))
        self._console.print(line)
        if finding.advice:
            self._console.print(Text(fitted(f"{'':22}action: {finding.advice}", self._width)))
