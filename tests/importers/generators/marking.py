"""Marks the answers on generated files: right, inconclusive or wrong."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from stallscope.commands.report import diagnosed
from stallscope.errors import BadTrace, NotFound
from stallscope.importers.reading import read_files
from stallscope.settings import Settings

from .shapes import SHAPES, Format, Truth

ACCUSING = ("straggler", "hang", "mismatch", "device", "failure")


@dataclass(frozen=True)
class Mark:
    """The result of one case. answer: healthy, found, inconclusive, or the error."""

    shape: str
    seed: int
    truth: Truth
    answer: str
    accused: frozenset[int]

    @property
    def result(self) -> str:
        if self.answer == "healthy" and self.truth.culprits:
            return "wrong"
        if self.accused:
            is_right = self.accused == self.truth.culprits
            is_right |= not self.truth.names_all and self.accused <= self.truth.culprits
            return "right" if is_right else "wrong"
        if self.truth.may_be_unknown or not self.truth.culprits:
            return "right"
        return "inconclusive"


@dataclass
class Tally:
    """All marks of a format."""

    form: Format
    marks: list[Mark] = field(default_factory=list)

    def count(self, result: str) -> int:
        return sum(mark.result == result for mark in self.marks)


def mark(form: Format, shape: str, seed: int) -> Mark:
    """One case: its files are written, read and diagnosed."""
    with tempfile.TemporaryDirectory(prefix="files-") as name:
        folder = Path(name)
        truth = SHAPES[shape](form, folder, Random(f"{form.name}/{shape}/{seed}"))
        try:
            reports = [diagnosed(trace, Settings()) for trace in read_files([folder]).traces]
        except (BadTrace, NotFound) as error:
            return Mark(shape, seed, truth, f"error: {error}", frozenset())
    verdicts = [verdict for report in reports for verdict in report.verdicts if verdict.kind in ACCUSING]
    jobs = [verdict.evidence.job.number for verdict in verdicts if verdict.evidence.job]
    last = max(jobs, default=0)  # each of several jobs has its own verdicts: the last job's are marked
    accused = frozenset(
        r for v in verdicts if not v.evidence.job or v.evidence.job.number == last for r in v.ranks
    )
    answers = [str(report.answer) for report in reports]
    answer = next((a for a in ("found", "inconclusive") if a in answers), "healthy")
    return Mark(shape, seed, truth, answer, accused)


def tally(form: Format, seeds: range) -> Tally:
    """Every shape with every seed."""
    return Tally(form, [mark(form, shape, seed) for shape in SHAPES for seed in seeds])
