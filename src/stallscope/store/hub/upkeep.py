"""Checks and repairs a hub's folder, copies it while the hub runs, and restores a copy.

A copy needs no cooperation of the hub. Between two checkpoints its file does not change and its log only grows, so
both are copied, and copied again if a checkpoint ran in between. Sealed files never change, and replaced files are
removed only minutes later.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from stallscope.errors import BadInput, StorageFailed
from stallscope.store.hub import schema, segments
from stallscope.store.hub.damage import (
    GAPS_NAME,
    POSITION_NAME,
    UNREADABLE,
    lost_commits,
    read_position,
    reason_unreadable_inside,
)
from stallscope.store.hub.duck_journal import FILE_NAME, DuckJournal
from stallscope.store.hub.folder_lock import LOCK_NAME
from stallscope.store.hub.journal import Segment, line

_ATTEMPTS = 10
_ALSO = ("tokens.json", GAPS_NAME, POSITION_NAME)


@dataclass
class FolderProblems:
    """Problems of a folder as sentences, of which n_repaired were repaired. n_rows: readable rows."""

    n_segments: int = 0
    n_rows: int = 0
    problems: list[str] = field(default_factory=list)
    n_repaired: int = 0


def check(folder: Path, *, repair: bool = False) -> FolderProblems:
    """Read everything in the folder of a stopped hub. Raises StorageFailed, NewerSchema, BadInput.

    repair: keep the readable row groups of damaged segments, and remove unreadable parts from the lists. The damaged
    files stay in the folder `damaged`.
    """
    if not (folder / FILE_NAME).is_file() and not segments.orphans(folder, ()):
        raise BadInput(
            f"{folder} is not a hub's folder ({FILE_NAME} is missing); give the folder of the hub's --db"
        )
    folder = folder.absolute()
    out = FolderProblems()
    with closing(DuckJournal.open(folder, may_be_lost=repair)) as journal:
        known = journal.segments()
        for segment in known:
            _check_segment(journal, segment, out, repair=repair)
        _check_journal(journal, out, repair=repair)
        _check_other_files(folder, journal, known, out, repair=repair)
    return out


def _check_segment(journal: DuckJournal, segment: Segment, out: FolderProblems, *, repair: bool) -> None:
    out.n_segments += 1
    reason = reason_unreadable_inside(journal.folder, segment)
    if not reason:
        out.n_rows += segment.n_rows
        return
    problem = f"segment {segment.path} ({segment.n_rows:,} rows): {reason}"
    if repair:
        kept = _salvaged(journal.folder, segment)
        journal.replace_segments([segment], [kept] if kept else [])
        _move(journal.folder, Path(segment.path))
        n_kept = kept.n_rows if kept else 0
        out.n_rows, out.n_repaired = out.n_rows + n_kept, out.n_repaired + 1
        problem += f"; {n_kept:,} rows kept"
    out.problems.append(problem)


def _salvaged(folder: Path, segment: Segment) -> Segment | None:
    """A new segment with the readable row groups of a damaged segment; None if no row is readable."""
    rows = list(_readable(folder / segment.path))
    if not rows:
        return None
    sealer = segments.Sealer(folder)
    try:
        sealer.db.register("salvaged", pa.concat_tables(rows, promote_options="default"))
        wanted = schema.TABLES[segment.table].names
        columns = [name if name in rows[0].column_names else f"NULL AS {name}" for name in wanted]
        select = f"SELECT {', '.join(columns)} FROM salvaged"
        return sealer.sealed(segment.tenant, segment.table, select=select, sealed_us=segment.sealed_us)
    finally:
        sealer.close()


def _readable(path: Path) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except UNREADABLE:
        return
    with file:
        for number in range(file.num_row_groups):
            with suppress(*UNREADABLE):
                yield file.read_row_group(number)


def _move(folder: Path, name: Path) -> None:
    """Move a file to the folder `damaged`."""
    target = folder / "damaged" / name
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileNotFoundError):
        (folder / name).rename(target)


def _check_journal(journal: DuckJournal, out: FolderProblems, *, repair: bool) -> None:
    for key, n_rows, reason in journal.checked_entries():
        if not reason:
            out.n_rows += n_rows
            continue
        out.problems.append(f"journal entry {key}: {reason}")
        if repair:
            journal.remove_entry(key)
            out.n_repaired += 1


def _check_other_files(
    folder: Path, journal: DuckJournal, known: list[Segment], out: FolderProblems, *, repair: bool
) -> None:
    if repair:
        known = journal.segments()
    latest_us, noted_us = journal.latest_us(), read_position(folder)
    for path in segments.orphans(folder, known):
        _check_unlisted(folder, journal, path, out, latest_us=latest_us, repair=repair)
    if noted_us > latest_us:
        out.problems.append(lost_commits(latest_us, noted_us))


def _check_unlisted(
    folder: Path, journal: DuckJournal, path: Path, out: FolderProblems, *, latest_us: int, repair: bool
) -> None:
    """A file that the list lacks: list it again if it is newer than the list, otherwise the journal has its rows."""
    name, sealed_us = path.relative_to(folder), segments.sealed_at_us(path)
    if (sealed_us is not None and sealed_us <= latest_us) or path.suffix != ".parquet":
        out.problems.append(f"{name} is not listed: from an interrupted seal, or replaced")
        if repair:
            path.unlink(missing_ok=True)
            out.n_repaired += 1
        return
    found = segments.found_again(folder, path)
    n_rows = f"{found.n_rows:,} rows" if found else "not a readable segment"
    problem = f"{name} ({n_rows}) is newer than the list"
    if repair and found:
        journal.replace_segments([], [found])
        out.n_rows, out.n_repaired = out.n_rows + found.n_rows, out.n_repaired + 1
        problem += "; listed again"
    elif repair:
        _move(folder, path.relative_to(folder))
        out.n_repaired += 1
        problem += "; moved to the folder `damaged`"
    out.problems.append(problem)


def back_up(folder: Path, target: Path) -> FolderProblems:
    """Copy the folder of a hub, running or not, to a new folder. Raises BadInput, StorageFailed."""
    if not (folder / FILE_NAME).is_file():
        raise BadInput(
            f"{folder} is not a hub's folder ({FILE_NAME} is missing); give the folder of the hub's --db"
        )
    _check_empty(target, "--to")
    for _ in range(_ATTEMPTS):
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            if _copied(folder, target):
                return check(target)
        except FileNotFoundError:  # a file was replaced during the copy
            pass
        except OSError as error:
            raise StorageFailed(
                f"cannot copy {folder} to {target}: {line(error)}; check free space"
            ) from error
        shutil.rmtree(target)
    raise StorageFailed(f"{folder} changed during each of {_ATTEMPTS} attempts to copy it; try again")


def _copied(folder: Path, target: Path) -> bool:
    """Copy everything; False if a checkpoint ran during the copy."""
    before = _state(folder / FILE_NAME)
    for name in (FILE_NAME, f"{FILE_NAME}.wal", *_ALSO):
        with suppress(FileNotFoundError):
            shutil.copy2(folder / name, target / name)
    if _state(folder / FILE_NAME) != before:
        return False
    with closing(DuckJournal.open(target)) as journal:
        known = journal.segments()
    for segment in known:
        path = target / segment.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _linked_or_copied(folder / segment.path, path)
    return True


def _linked_or_copied(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copy2(source, target)


def restore(backup: Path, folder: Path) -> FolderProblems:
    """Restore a copy as the folder of a hub. Raises BadInput, StorageFailed."""
    _check_empty(folder, "--db")
    if not (backup / FILE_NAME).is_file():
        raise BadInput(f"{backup} is not a copy of a hub ({FILE_NAME} is missing)")
    try:
        shutil.copytree(backup, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK_NAME))
        folder.chmod(0o700)
    except (OSError, shutil.Error) as error:
        raise StorageFailed(f"cannot copy {backup} to {folder}: {line(error)}; check free space") from error
    return check(folder)


def _check_empty(folder: Path, option: str) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{option}: {folder} is not empty; choose a new folder")


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
