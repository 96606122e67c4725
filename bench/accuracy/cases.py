"""The known cases: which test stands for each, or why none can."""

from typing import NamedTuple


class Known(NamedTuple):
    """One case. test: function in tests/diagnose/test_cases.py. says: the answer it wants. why_not: why no test."""

    test: str = ""
    says: str = ""
    why_not: str = ""


CASES: dict[str, Known] = {}
