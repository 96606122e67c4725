"""Failures that a log states, as annotations of a trace: label and value.

The value is "exit status|process id|host|words": numbers are -1 where the log does not state them. The words are cut at
the length of an annotation's value. The stack of a failure is the position of the same process and time.
"""

from dataclasses import dataclass

FAILURE_LABELS = {
    "failure": b"failure",  # an error or end that does not follow from another
    "aftermath": b"aftermath",  # follows from another rank's end: connections reset, SIGTERM of a launcher
    "machine": b"machine",  # reported by the machine: Xid, out-of-memory killer
    "slow": b"slow",  # a rank is slower than the others
    "remark": b"remark",  # notable, but not an end: a transport that fell back
}
STATED = "stated_by"
"""The key in Trace.facts of a trace that holds statements instead of measurements."""

_MAX_BYTES = 128


@dataclass(frozen=True)
class FailureWords:
    """status, pid: -1 where unknown."""

    status: int
    pid: int
    host: str
    words: str


def failure_label(words: str, status: int, *, pid: int = -1, host: str = "") -> bytes:
    """The value of the annotation."""
    text = f"{status}|{pid}|{host[:24].replace('|', '/')}|{' '.join(words.split())}"
    return text.encode("utf-8", "replace")[:_MAX_BYTES].decode("utf-8", "ignore").encode()


def failure_words(value: bytes) -> FailureWords:
    """The parts of the value. Raises ValueError for other text."""
    status, pid, host, words = value.decode("utf-8", "replace").split("|", 3)
    return FailureWords(int(status), int(pid), host, words)
