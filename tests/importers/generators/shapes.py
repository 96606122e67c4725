"""The shapes in which the files of a job are written: which rank, which operation, several groups, damaged files.

Every generator writes the same shapes. The truth of a shape is the set of ranks that a report may accuse, and whether
the files still show them: where a shape removes the evidence, an inconclusive answer is right as well.
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from .job import Job, random_job


@dataclass(frozen=True)
class Truth:
    """culprits: the ranks to name. may_be_unknown: the files may leave the culprits open. names_all: the report
    names all of them, otherwise at least one."""

    culprits: frozenset[int]
    may_be_unknown: bool = False
    names_all: bool = True


@dataclass(frozen=True)
class Format:
    """A kind of file. write: the files of a job into an empty folder; is_text: its files may have any encoding.

    source: the documentation or the source code that the writer follows, with version or commit. has_groups: the
    format names groups. names_group_ranks: it states the job's rank of each member. names_all: it names all slow
    ranks, not one of them. can_append: files of two jobs may be in one file.
    can_compress: a compressed file is read.
    """

    name: str
    source: str
    write: Callable[[Path, Job, Random], None]
    is_text: bool = True
    has_groups: bool = True
    names_group_ranks: bool = True
    names_all: bool = True
    can_append: bool = True
    can_compress: bool = True


Shape = Callable[[Format, Path, Random], Truth]


def first_rank(form: Format, folder: Path, chance: Random) -> Truth:
    return _plain(form, folder, chance, culprits=(0,))


def last_rank(form: Format, folder: Path, chance: Random) -> Truth:
    return _plain(form, folder, chance, culprits=(-1,), op="reduce_scatter")


def any_rank(form: Format, folder: Path, chance: Random) -> Truth:
    return _plain(form, folder, chance)


def many_ranks(form: Format, folder: Path, chance: Random) -> Truth:
    return _plain(form, folder, chance, n_ranks=32, op="all_reduce")


def two_culprits(form: Format, folder: Path, chance: Random) -> Truth:
    truth = _plain(form, folder, chance, n_ranks=16, culprits=(2, 9))
    return replace(truth, names_all=form.names_all)


def groups_that_agree(form: Format, folder: Path, chance: Random) -> Truth:
    """Several groups; the culprit misses the call of all ranks."""
    return _plain(form, folder, chance, n_groups=2 if form.has_groups else 0)


def stuck_in_group(form: Format, folder: Path, chance: Random) -> Truth:
    """The culprit misses a call of its own group; the other groups wait in the call of all ranks."""
    n_groups = 2 if form.has_groups else 0
    truth = _plain(form, folder, chance, n_ranks=8, n_groups=n_groups, stops_in_group=True)
    return replace(truth, may_be_unknown=not form.names_group_ranks)


def restarted_job(form: Format, folder: Path, chance: Random) -> Truth:
    """The files of an earlier attempt, with another culprit, lie in a folder of their own."""
    job = random_job(chance, n_ranks=8)
    earlier = replace(job, culprits=((job.culprits[0] + 3) % 8,), number=0, last_step=job.last_step - 10)
    later = replace(job, number=1)
    name = chance.choice(("attempt_{}", "run{}"))
    for attempt, each in enumerate((earlier, later)):
        part = folder / name.format(attempt)
        part.mkdir(parents=True)
        form.write(part, each, chance)
    return Truth(frozenset(later.culprits), may_be_unknown=True)


def two_jobs(form: Format, folder: Path, chance: Random) -> Truth:
    """The files of two jobs: in one file each where the format permits it, otherwise in one folder each."""
    first = random_job(chance, n_ranks=8)
    second = replace(random_job(chance, n_ranks=8), number=1)
    for name, job in (("a", first), ("b", second)):
        (folder / name).mkdir(parents=True)
        form.write(folder / name, job, chance)
    if form.can_append:
        for file in _files(folder / "b"):
            target = folder / "a" / file.relative_to(folder / "b")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as stream:
                stream.write(file.read_bytes())
            file.unlink()
    return Truth(frozenset(second.culprits), may_be_unknown=True)


def cut_off(form: Format, folder: Path, chance: Random) -> Truth:
    """One file that is not the culprit's ends in the middle."""
    job = random_job(chance, n_ranks=8)
    form.write(folder, job, chance)
    files = _files(folder)
    spared = {i for i in range(len(files)) if len(files) > 1 and i in job.culprits}
    target = files[chance.choice([i for i in range(len(files)) if i not in spared])]
    size = target.stat().st_size
    target.write_bytes(target.read_bytes()[: int(size * chance.uniform(0.5, 0.97))])
    return Truth(frozenset(job.culprits), may_be_unknown=True)


def other_encoding(form: Format, folder: Path, chance: Random) -> Truth:
    """Text as UTF-16, with CRLF, with bytes that are not UTF-8, or any file compressed."""
    job = random_job(chance)
    form.write(folder, job, chance)
    how = chance.choice(("utf-16", "crlf", "latin-1", "gzip") if form.is_text else ("gzip",))
    for file in _files(folder) if form.can_compress else ():
        raw = file.read_bytes()
        if raw[:2] == b"PK":  # a zip file
            continue
        if how == "utf-16":
            file.write_bytes(raw.decode("utf-8").encode("utf-16"))
        elif how == "crlf":
            file.write_bytes(raw.replace(b"\n", b"\r\n"))
        elif how == "latin-1":
            file.write_bytes(raw + "größer\n".encode("latin-1") if b"{" not in raw[:20] else raw)
        else:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(raw, 1))
            file.unlink()
    return Truth(frozenset(job.culprits))


def missing_file(form: Format, folder: Path, chance: Random) -> Truth:
    """The file of one rank that is not a culprit is missing."""
    job = random_job(chance, n_ranks=8)
    form.write(folder, job, chance)
    files = _files(folder)
    if len(files) >= job.n_ranks:
        files[chance.choice([i for i in range(job.n_ranks) if i not in job.culprits])].unlink()
    return Truth(frozenset(job.culprits), may_be_unknown=True)


def no_fault(form: Format, folder: Path, chance: Random) -> Truth:
    """No rank is at fault: nothing may be accused."""
    form.write(folder, random_job(chance, culprits=()), chance)
    return Truth(frozenset(), may_be_unknown=True)


SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (
        *(first_rank, last_rank, any_rank, many_ranks, two_culprits, groups_that_agree, stuck_in_group),
        *(restarted_job, two_jobs, cut_off, other_encoding, missing_file, no_fault),
    )
}


def _plain(form: Format, folder: Path, chance: Random, **fixed: object) -> Truth:
    job = random_job(chance, **fixed)
    form.write(folder, job, chance)
    return Truth(frozenset(job.culprits))


def _files(folder: Path) -> list[Path]:
    """The files below a folder in the order of their ranks."""
    from stallscope.importers.texts import natural_order

    return sorted((path for path in folder.rglob("*") if path.is_file()), key=natural_order)
