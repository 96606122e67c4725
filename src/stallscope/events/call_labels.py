"""Words for calls and process groups that a source names: stored with a trace, read by the diagnosis.

A call's words are an annotation with the label CALL_LABEL: "all_reduce [1024] Float|default_pg (group 0)|train.py:10".
The words of a group are a fact of the trace, under the key group_fact().
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

CALL_LABEL = b"call"
SCHEDULE_FACT = "profiler_schedule"
"""The key in Trace.facts of profiles whose schedule marked the steps and so leaves out the warm-up."""

_MAX_BYTES = 128
_MAX_GROUP, _MAX_OPERATION = 40, 40


@dataclass(frozen=True)
class CallWords:
    """operation, group and line of a call; "" for parts that the source does not state."""

    operation: str
    group: str
    line: str


def group_fact(comm_hash: int) -> str:
    """The key in Trace.facts under which a communicator's name is stored."""
    return f"group {comm_hash & (2**64 - 1):016x}"


def call_label(operation: str, group: str, line: str) -> bytes:
    """The words of a call as the value of an annotation, without the folders of the file."""
    location, _, function = line.rpartition(" ")
    short = f"{PurePosixPath(location).name} {function}".strip()
    parts = (operation[:_MAX_OPERATION], group[:_MAX_GROUP], short)
    text = "|".join(part.replace("|", "/") for part in parts)
    return text.encode("utf-8", "replace")[:_MAX_BYTES].decode("utf-8", "ignore").encode()


def call_words(value: bytes) -> CallWords:
    """The words of a call from the value of an annotation."""
    operation, group, line = ([*value.decode("utf-8", "replace").split("|"), "", ""])[:3]
    return CallWords(operation, group, line)
