"""`stallscope hub check`, `backup`, `restore`: maintenance of a hub's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import HubDb, SettingsFile, settings_from
from stallscope.errors import StorageFailed

if TYPE_CHECKING:
    from stallscope.store.hub.upkeep import FolderProblems


def check(
    folder: Annotated[Path, typer.Argument(help="Folder of a stopped hub, or of a backup.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Keep the readable data, set the damaged files aside.")
    ] = False,
) -> None:
    """Read every file of a hub's folder and report damage.

    The exit code is 4 if damage remains.
    """
    from stallscope.store.hub import upkeep

    findings = upkeep.check(folder, repair=repair)
    _print(findings)
    if len(findings.problems) > findings.n_repaired:
        raise StorageFailed(
            f"{folder} is damaged; restore it from a backup, or run: stallscope hub check --repair {folder}"
        )


def backup(
    to: Annotated[Path, typer.Option("--to", help="New folder for the copy.")],
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Copy a hub's folder, even while the hub runs. Sealed files are linked if possible."""
    from stallscope.store.hub import upkeep

    _print(upkeep.back_up(settings_from({"hub_db": db}, settings).hub_db, to))


def restore(
    source: Annotated[Path, typer.Option("--from", help="Folder created by `hub backup`.")],
    db: HubDb = None,
    settings: SettingsFile = None,
) -> None:
    """Restore a backup as the folder of a hub.

    The folder must not exist yet.
    """
    from stallscope.store.hub import upkeep

    _print(upkeep.restore(source, settings_from({"hub_db": db}, settings).hub_db))


def _print(findings: FolderProblems) -> None:
    for problem in findings.problems:
        typer.echo(problem)
    repaired = f", {findings.n_repaired} repaired" if findings.n_repaired else ""
    typer.echo(
        f"{findings.n_rows:,} rows, {findings.n_segments} segments, {len(findings.problems)} problems{repaired}"
    )
