"""Files of every format with a known truth (see generators): no wrong rank, no undeserved "healthy", no traceback."""

import pytest

from .generators import FORMATS, SHAPES, Format, mark


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_format_accuses_a_wrong_rank_or_calls_a_fault_healthy(form: Format):
    marks = [mark(form, shape, seed=0) for shape in SHAPES if shape != "many_ranks"]
    wrong = [
        (m.shape, sorted(m.truth.culprits), m.answer, sorted(m.accused)) for m in marks if m.result == "wrong"
    ]
    assert not wrong
    assert sum(m.result == "right" for m in marks) >= 0.95 * len(marks)
    assert sum(bool(m.accused) for m in marks) >= 6
