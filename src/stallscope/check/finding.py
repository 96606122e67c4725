"""One line of the check's output."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """pass: ready. warn: works with limits. fail: does not work."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """subject: the examined part. found: its state. advice: the remedy; empty if none is needed."""

    subject: str
    state: State
    found: str
    advice: str = ""


def passed(subject: str, result: str) -> Finding:
    """The subject is ready."""
    return Finding(subject, State.PASS, result)


def warned(subject: str, result: str, advice: str) -> Finding:
    """The subject works with limits."""
    return Finding(subject, State.WARN, result, advice)


def failed(subject: str, result: str, advice: str) -> Finding:
    """The subject does not work."""
    return Finding(subject, State.FAIL, result, advice)
