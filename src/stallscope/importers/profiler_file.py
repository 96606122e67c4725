"""One file of torch.profiler (Kineto): what is kept of its events. Chrome trace JSON, plain or gzip."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN
from stallscope.importers.texts import head_of, text_of

_MOST_BYTES = 400 << 20  # of one file, unpacked
_MOST_EVENTS = 5_000_000
_WORDS = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"', b'"schemaVersion"')
_NAME = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.\d+(\.pt)?\.trace\.json(\.gz)?$")
_CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
_LAST_NS = 2**61


@dataclass
class Profile:
    """One file. Times ns since 1970. calls: (ts, duration, tid, name, correlation); work: (ts, end, tid, is_loader)
    of other recorded operations; kernels: (ts, duration, correlation, arguments) of NCCL.
    """

    file: Path
    rank: int = UNKNOWN
    nranks: int = UNKNOWN
    pid: int = 0
    calls: list[tuple[int, int, int, str, int]] = field(default_factory=list)
    work: list[tuple[int, int, int, bool]] = field(default_factory=list)
    kernels: list[tuple[int, int, int, dict[str, Any]]] = field(default_factory=list)

    @cached_property
    def host(self) -> str:
        """As the profiler names its files; the file's own name where somebody renamed it."""
        found = _NAME.match(self.file.name)
        return found["host"] if found else self.file.name.split(".")[0]


def looks_like_a_profile(file: Path) -> bool:
    """Whether a file is a torch.profiler trace, by its first bytes."""
    if not re.search(r"\.json(\.gz)?$", file.name):
        return False
    head = head_of(file)
    return head.lstrip()[:1] == b"{" and sum(word in head for word in _WORDS) >= 2


def profile_of(file: Path) -> Profile:
    """One file, read. Raises BadTrace."""
    text = text_of(file, _MOST_BYTES)
    found = re.search(r'"traceEvents"\s*:\s*\[', text)
    if not found:
        raise BadTrace(f"{file} has no traceEvents: is it a torch.profiler trace?")
    profile = Profile(file)
    try:
        # What stands before the events is small; the events are decoded one by one, so that memory stays low.
        head = json.loads(text[: found.start()].rstrip().rstrip(",") + "}")
        base_ns = int(head.get("baseTimeNanoseconds") or 0)
        told = head.get("distributedInfo") or {}
        profile.rank, profile.nranks = whole(told.get("rank")), whole(told.get("world_size"))
        for event in _events(text, found.end(), file):
            _take(profile, event, base_ns)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise BadTrace(f"{file} is damaged ({str(error)[:120]}): copy it again") from error
    return profile


def _events(text: str, at: int, file: Path) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s,]*")
    for _ in range(_MOST_EVENTS):
        at = space.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            return
        event, at = decoder.raw_decode(text, at)
        if isinstance(event, dict):
            yield event
    raise BadTrace(f"{file} has more than {_MOST_EVENTS:,} events: profile fewer steps")


def _take(profile: Profile, event: dict[str, Any], base_ns: int) -> None:
    """Keeps what is needed of one event."""
    if event.get("ph") != "X":
        return
    kind, name = event.get("cat"), str(event.get("name"))[:128]
    begin, length = base_ns + round(float(event["ts"]) * 1000), round(float(event["dur"]) * 1000)
    if not (0 <= begin < _LAST_NS and 0 <= length < _LAST_NS):
        raise ValueError("a time is out of range")
    arguments = event.get("args") or {}
    if kind in _CALL_CATEGORIES:
        profile.pid = profile.pid or max(whole(event.get("pid")), 0)
        profile.calls.append(
            (begin, length, whole(event.get("tid")), name, whole(arguments.get("correlation")))
        )
    elif kind == "kernel":
        if name.startswith("nccl") and "Collective name" in arguments:
            profile.kernels.append((begin, length, whole(arguments.get("correlation")), arguments))
    elif kind == "cpu_op" or (kind == "user_annotation" and "DataLoader" in name):
        is_loader = "DataLoader" in name and "__next__" in name
        profile.work.append((begin, begin + length, whole(event.get("tid")), is_loader))


def whole(value: object) -> int:
    """The number where it is one that fits 32 bits, else -1 (unknown)."""
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else UNKNOWN
