"""`stallscope hub check`, `backup`, `restore`: maintenance of a hub's folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.hub_status import Shared
from stallscope.commands.options import HubDb, SettingsFile, settings_from
from stallscope.errors import BadInput, StorageFailed
from stallscope.events.counted import counted

if TYPE_CHECKING:
    from stallscope.settings import Settings
    from stallscope.store.hub.upkeep import FolderProblems

BucketAddress = Annotated[
    str | None, typer.Option("--bucket", help="Bucket of the hubs: s3://BUCKET/PREFIX.")
]


def check(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a stopped hub, or of a backup.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Keep the readable data, set the damaged files aside.")
    ] = False,
    shared: Shared = None,
    bucket: BucketAddress = None,
    settings: SettingsFile = None,
) -> None:
    """Read every file of a hub's folder and report damage.

    Without a folder: the bucket of hubs that share their data, while they run. The exit code is 4 if damage remains.
    """
    from stallscope.store.hub import upkeep

    if folder is None:
        _check_bucket(settings_from({"hub_shared": shared, "hub_bucket": bucket}, settings), is_repair=repair)
        return
    findings = upkeep.check(folder, repair=repair)
    _print(findings)
    if len(findings.problems) > findings.n_repaired:
        raise StorageFailed(
            f"{folder} is damaged; restore it from a backup, or run: stallscope hub check --repair {folder}"
        )


def _check_bucket(settings: Settings, *, is_repair: bool) -> None:
    if not settings.hub_shared or not settings.hub_bucket:
        raise BadInput("hub check needs a folder, or --shared and --bucket")
    if is_repair:
        raise BadInput("--repair needs a folder; restore damaged objects of a bucket from a copy")
    from stallscope.store.shared import postgres_schema, sweep
    from stallscope.store.shared.bucket import Bucket
    from stallscope.store.shared.postgres import Postgres
    from stallscope.store.shared.segment_cache import SegmentCache

    objects = Bucket(settings.hub_bucket)
    objects.checked()
    with (
        closing(Postgres(settings.hub_shared, name="stallscope-check")) as postgres,
        TemporaryDirectory() as folder,
        closing(SegmentCache(Path(folder), objects, max_bytes=0)) as cache,
    ):
        postgres.checked()
        postgres_schema.prepare(postgres)
        findings = sweep.check(postgres, objects, cache)
    for problem in findings.problems:
        typer.echo(problem)
    typer.echo(
        f"{counted(findings.n_segments, 'segment')}, {counted(findings.n_rows, 'readable row')}, "
        f"{counted(len(findings.problems), 'problem')}, {counted(findings.n_unlisted, 'object')} that no list names"
    )
    if findings.problems:
        raise StorageFailed("the bucket is damaged; restore the objects from a copy")


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
        f"{counted(findings.n_rows, 'row')}, {counted(findings.n_segments, 'segment')}, "
        f"{counted(len(findings.problems), 'problem')}{repaired}"
    )
