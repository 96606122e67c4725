"""Every importer on damaged files: an answer or one clear line, in bounded time, and never a traceback."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from stallscope.commands.report import diagnosed
from stallscope.errors import BadTrace, NotFound
from stallscope.importers.reading import read_files
from stallscope.settings import Settings

from .generators import FORMATS, Format
from .generators.job import Job

JOB = Job(n_ranks=4, culprits=(2,), last_step=6, n_steps=6)


def flipped(raw: bytearray, chance: Random) -> None:
    for _ in range(chance.choice((1, 8, 64))):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def cut(raw: bytearray, chance: Random) -> None:
    del raw[chance.randrange(len(raw)) :]


def with_a_hole(raw: bytearray, chance: Random) -> None:
    begin = chance.randrange(len(raw))
    del raw[begin : begin + chance.randrange(1, 400)]


def repeated(raw: bytearray, chance: Random) -> None:
    begin = chance.randrange(len(raw))
    raw[begin:begin] = raw[begin : begin + chance.randrange(1, 400)] * chance.choice((1, 40))


def with_odd_numbers(raw: bytearray, chance: Random) -> None:
    """Numbers replaced by numbers at and beyond the limits of types."""
    digits = [i for i in range(len(raw)) if chr(raw[i]).isdigit()]
    for _ in range(chance.choice((1, 5, 20)) if digits else 0):
        i = chance.choice([d for d in digits if d < len(raw)])
        raw[i : i + 1] = chance.choice(
            (b"-1", b"99999999999999999999", b"4294967296", b"1e309", b"NaN", b"0", b"null")
        )


def with_nonsense(raw: bytearray, chance: Random) -> None:
    i = chance.randrange(len(raw))
    raw[i:i] = chance.choice(
        (b"\0" * 300, b"\xff\xfe\xfd", b"[" * 5000, b"{" * 3000, b'"' * 7, b"\n" * 500, b"\x1b[31m")
    )


DAMAGES: tuple[Callable[[bytearray, Random], None], ...] = (
    *(flipped, cut, with_a_hole, repeated, with_odd_numbers, with_nonsense),
)


def answer(folder: Path) -> str:
    try:
        reports = [diagnosed(trace, Settings()) for trace in read_files([folder]).traces]
    except (BadTrace, NotFound) as error:
        assert "\n" not in str(error)
        return "error"
    return reports[0].answer


def damage(form: Format, folder: Path, seed: int, how: Callable[[bytearray, Random], None]) -> None:
    chance = Random(f"{form.name}/{seed}/{how.__name__}")
    form.write(folder, JOB, chance)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files if seed % 2 else [chance.choice(files)]:
        raw = bytearray(file.read_bytes())
        how(raw, chance)
        file.write_bytes(raw)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_damage_gives_an_answer_or_one_line(tmp_path: Path, form: Format):
    for number, how in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        damage(form, folder, number, how)
        answer(folder)
