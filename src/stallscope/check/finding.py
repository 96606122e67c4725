"""One line of the answer."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """pass: as it should be. warn: it works, with less. fail: it does not work."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """subject: what was looked at. found: what there is. advice: what to do; empty where nothing is to be done."""

    subject: str
    state: State
    found: str
    advice: str = ""


def passed(subject: str, found: str) -> Finding:
    """All is well."""
    return Finding(subject, State.PASS, found)


def warned(subject: str, found: str, advice: str) -> Finding:
    """It works, with less."""
    return Finding(subject, State.WARN, found, advice)


def failed(subject: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(subject, State.FAIL, found, advice)
