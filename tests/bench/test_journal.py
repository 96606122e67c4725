"""A proof run continues where the last run ended."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "bench" / "accuracy"
sys.path.insert(0, str(FOLDER))

from journal import Journal  # noqa: E402


class Square:
    """Counts its calls."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, number: int) -> int:
        self.n_calls += 1
        return number * number


def test_a_second_run_computes_only_the_missing_cases(tmp_path: Path) -> None:
    journal, square = Journal(tmp_path / "part.pickles", 1.0), Square()
    assert journal.spread()(square, range(5)) == [0, 1, 4, 9, 16]
    assert journal.spread()(square, range(7)) == [0, 1, 4, 9, 16, 25, 36]
    assert square.n_calls == 7


def test_a_result_that_was_cut_is_computed_again(tmp_path: Path) -> None:
    journal, square = Journal(tmp_path / "part.pickles", 1.0), Square()
    journal.spread()(square, range(5))
    journal.path.write_bytes(journal.path.read_bytes()[:-3])
    assert journal.spread()(square, range(5)) == [0, 1, 4, 9, 16]
    assert square.n_calls == 6
    assert journal.spread()(square, range(5)) == [0, 1, 4, 9, 16]
    assert square.n_calls == 6


def test_no_case_begins_after_the_time_limit(tmp_path: Path) -> None:
    square = Square()
    assert Journal(tmp_path / "part.pickles", -1.0).spread()(square, range(5)) == []
    assert square.n_calls == 0
