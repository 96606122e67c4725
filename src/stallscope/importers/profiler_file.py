"""One file of torch.profiler (Kineto), or the same events in another tool's wrapper, as a Profile.

Chrome trace JSON: an object with traceEvents and metadata before or after them, or the bare list of events. Events are
decoded in blocks, so that memory stays low. Durations that are negative or missing and other damaged events are left
out and counted; a file that ends in the middle is read until there.
The names of arguments follow torch/csrc/profiler/util.h and ParamCommsUtils.hpp (PyTorch 2.2 to 2.9).
"""

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN, Array
from stallscope.importers import gloo_collectives
from stallscope.importers.event_blocks import event_blocks
from stallscope.importers.file_ranks import named_rank
from stallscope.importers.functions import op_of
from stallscope.importers.gloo_collectives import GlooCollectives
from stallscope.importers.kernel_arguments import collective_of, whole
from stallscope.importers.rank_profile import CALL, KERNEL, STEP, WORK, Collective, Profile, op_of_kernel
from stallscope.importers.texts import text_of

_MAX_BYTES = 2 << 30  # of one file, unpacked
_MAX_EVENTS = 20_000_000
_WORDS = (b'"deviceProperties"', b'"distributedInfo"', b'"schemaVersion"', b'"cuda_runtime"', b'"cpu_op"')
_EVENT_WORDS = (b'"ph"', b'"ts"', b'"cat"')
_NAME = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.\d+(\.pt)?\.trace\.json(\.\w+)?$")
_RUNTIMES = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime")
_KERNELS = ("kernel", "Kernel")
_OPERATORS = ("cpu_op", "Operator")
_LAST_NS = 2**61
_FIRST_GLOO = 1 << 40  # above all correlation numbers of CUDA, which have 32 bits
_GLOO_STREAM = 1 << 40
_PACKED = 1 << 16
_FUSED = '"RANK 0 - '  # the name of a process


def is_profile(head: bytes) -> bool:
    """Whether a file is such a trace, by its first bytes."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start == b"[":
        return all(word in head for word in _EVENT_WORDS) and any(word in head for word in _WORDS)
    if start != b"{":
        return False
    return sum(word in head for word in (*_WORDS, b'"traceEvents"')) >= 2


def profiles_of(file: Path) -> list[Profile]:
    """The profiles in one file: several if TraceLens has fused the traces of several ranks. Raises BadTrace."""
    text = text_of(file, _MAX_BYTES)
    match = re.search(r'"traceEvents"\s*:\s*\[', text)
    begin = match.end() if match else text.find("[") + 1 if text.lstrip("\ufeff \t\r\n")[:1] == "[" else 0
    if not begin:
        raise BadTrace(f"{file} has no traceEvents: check that it is a torch.profiler trace")
    try:
        with _no_collections():
            readers, end = _read(file, text, begin)
        if None not in readers:
            return [reader.profile({"distributedInfo": {"rank": rank}}) for rank, reader in readers.items()]
        before = text[: match.start()] if match else ""
        return [readers[None].profile(_metadata(before, text[end:] if match else ""))]
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        reason = str(error).replace("\n", " ")[:120]
        raise BadTrace(f"{file} is damaged ({reason}): copy it again") from error


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without Python's cycle collector, which scans all kept events repeatedly: 1.2 instead of 1.7 times the time
    of json.loads on 450,000 events. Events hold no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _metadata(before: str, after: str) -> dict[str, Any]:
    """The fields around the events, and the nested fields of a wrapper. Damaged fields are left out."""
    fields: dict[str, Any] = {}
    for text in (before.rstrip().rstrip(",") + "}", "{" + after.lstrip("] \r\n\t,")):
        try:
            value, _ = json.JSONDecoder().raw_decode(text.strip("\ufeff \t\r\n"))
        except (ValueError, RecursionError):
            continue
        fields |= value if isinstance(value, dict) else {}
    for inner in list(fields.values()):
        if isinstance(inner, dict) and ("distributedInfo" in inner or "baseTimeNanoseconds" in inner):
            fields = inner | fields
    return fields


def _read(file: Path, text: str, at: int) -> tuple[dict[int | None, "_Reader"], int]:
    """Readers that have taken all events from a position on, and the position after the events.

    The readers are by rank in a fused trace (TraceLens' TraceFuse adds the rank to the arguments of each event, and
    names its processes "RANK 0 - GPU"); otherwise there is one reader, for None.
    """
    is_fused = _FUSED in text
    readers: dict[int | None, _Reader] = {} if is_fused else {None: _Reader(file)}
    n_events = 0
    for events, end in event_blocks(text, at):
        at = end
        if events is None:
            for reader in readers.values():
                reader.is_cut_off = True
            break
        n_events += len(events)
        if n_events > _MAX_EVENTS:
            raise BadTrace(f"{file} has more than {_MAX_EVENTS:,} events: profile fewer steps")
        for rank, own in _by_rank(events).items() if is_fused else ((None, events),):
            readers.setdefault(rank, _Reader(file)).take(own)
    return readers, at


def _by_rank(events: list[Any]) -> dict[int, list[Any]]:
    out: dict[int, list[Any]] = {}
    for event in events:
        arguments = event.get("args") if type(event) is dict else None
        rank = whole(arguments.get("rank")) if type(arguments) is dict else UNKNOWN
        if rank != UNKNOWN:
            out.setdefault(rank, []).append(event)
    return out


def _is_plain_operator(event: dict[str, Any]) -> bool:
    """Whether only the times and the thread of an event are needed."""
    if event["cat"] not in _OPERATORS:
        return False
    name, arguments = event.get("name"), event.get("args") or {}
    if type(name) is not str or type(arguments) is not dict:
        return False
    prefixes = (gloo_collectives.PREFIX, gloo_collectives.CALL_PREFIX)
    return "Collective name" not in arguments and not name.startswith(prefixes)


class _Reader:
    """Keeps the needed part of each event."""

    def __init__(self, file: Path):
        self.file = file
        self.pid = 0
        self.rank = UNKNOWN
        self.calls: list[tuple[int, int, int, int, int, int]] = []
        self.gloo = GlooCollectives()
        self.work: list[tuple[int, int, int, bool]] = []
        self.work_parts: list[Array] = []
        self.call_parts: list[Array] = []
        self.kernels: list[tuple[int, int, int, int, int]] = []
        self.steps: list[tuple[int, int]] = []
        self.symbols: dict[str, int] = {}
        self.ops: list[int] = []
        self.collectives: dict[Collective, int] = {}
        self.arguments: dict[int, dict[str, Any]] = {}  # of operators, by External id
        self.unnamed: list[
            tuple[int, int, str]
        ] = []  # kernels without arguments: their number, External id, name
        self.omitted: dict[str, int] = {}
        self.is_cut_off = False

    def take(self, events: list[Any]) -> None:
        """Keep the needed part of some events."""
        plain: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for event in events:
            if type(event) is dict and event.get("ph") == "X" and event.get("cat") in _WANTED:
                (plain if _is_plain_operator(event) else others).append(event)
        if not self._take_plain_operators(plain):
            others += plain
        for event in others:
            self._take(event)
        self._pack(least=_PACKED)

    def _take_plain_operators(self, events: list[dict[str, Any]]) -> bool:
        """Keep operators without a collective at once; False, with nothing kept, if one of them is damaged.

        Most events of a trace are such operators.
        """
        try:
            times = np.array([(event["ts"], event["dur"]) for event in events], float).reshape(-1, 2) * 1000
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        if not (np.abs(times) < _LAST_NS).all() or (times[:, 1] < 0).any():
            return False
        rows = np.zeros(len(events), WORK)
        rows["begin_ns"], durations_ns = np.rint(times).astype(np.int64).T
        rows["end_ns"] = rows["begin_ns"] + durations_ns
        rows["tid"] = [whole(event.get("tid")) for event in events]
        self.work_parts.append(rows)
        return True

    def _pack(self, *, least: int) -> None:
        """Turn long lists of events into arrays, which need a fraction of the memory."""
        if len(self.work) >= least:
            self.work_parts.append(np.array(self.work, WORK))
            self.work.clear()
        if len(self.calls) >= least:
            self.call_parts.append(np.array(self.calls, CALL))
            self.calls.clear()

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["cat"]
        try:
            begin, duration = round(float(event["ts"]) * 1000), round(float(event["dur"]) * 1000)
        except (KeyError, TypeError, ValueError, OverflowError):
            self._omit("events without a time or duration")
            return
        if duration < 0:
            self._omit("events with a negative duration")
            return
        if not (-_LAST_NS < begin < _LAST_NS and duration < _LAST_NS):
            self._omit("events with a time out of range")
            return
        name, arguments = event.get("name"), event.get("args") or {}
        if type(name) is not str or type(arguments) is not dict:
            self._omit("events with damaged fields")
            return
        end = begin + duration
        if name.startswith((gloo_collectives.PREFIX, gloo_collectives.CALL_PREFIX)):
            is_collective = self.gloo.take(name, begin, end, whole(event.get("tid")))
            if name.startswith(gloo_collectives.PREFIX):
                if not is_collective:
                    self._omit("messages and barriers of gloo")
                return
        if kind in _OPERATORS:
            self.work.append((begin, end, whole(event.get("tid")), False))
            if "Collective name" in arguments and "External id" in arguments:
                self.arguments[whole(arguments["External id"])] = arguments
        elif kind in _RUNTIMES:
            self._take_call(event, name, begin, duration, whole(arguments.get("correlation")))
        elif kind in _KERNELS:
            self._take_kernel(event, name, begin, duration, arguments)
        elif name.startswith("ProfilerStep#"):
            number = name[13:]
            self.steps.append((begin, int(number) if number.isdecimal() and len(number) < 16 else UNKNOWN))
        elif "DataLoader" in name:
            self.work.append((begin, end, whole(event.get("tid")), "__next__" in name))

    def _omit(self, reason: str) -> None:
        self.omitted[reason] = self.omitted.get(reason, 0) + 1

    def _take_call(
        self, event: dict[str, Any], name: str, begin: int, duration: int, correlation: int
    ) -> None:
        symbol = self.symbols.get(name)
        if symbol is None:
            symbol = self.symbols[name] = len(self.symbols)
            self.ops.append(op_of(name))
        if not self.pid:
            self.pid = max(whole(event.get("pid")), 0)
        self.calls.append((begin, duration, whole(event.get("tid")), self.ops[symbol], symbol, correlation))

    def _take_gloo(self, work: Array, info: dict[str, Any]) -> None:
        """The collectives of gloo: calls and, in place of kernels, the time until the completion."""
        group = gloo_collectives.only_group(info)
        for number, each in enumerate(self.gloo.collectives(work)):
            event = {"tid": each.tid}
            self._take_call(event, each.name, each.begin_ns, each.wait_ns, _FIRST_GLOO + number)
            self.kernels.append(
                (
                    each.begin_ns,
                    each.end_ns,
                    _FIRST_GLOO + number,
                    _GLOO_STREAM,
                    self._number(replace(group, op=each.op)),
                )
            )

    def _take_kernel(
        self, event: dict[str, Any], name: str, begin: int, duration: int, arguments: dict[str, Any]
    ) -> None:
        if "Collective name" not in arguments:
            op = op_of_kernel(name)
            if op is None:
                return
            self.unnamed.append((len(self.kernels), whole(arguments.get("External id")), name))
            number = self._number(Collective(op))
        else:
            number = self._number(collective_of(arguments))
        stream = whole(arguments.get("stream", event.get("tid")))
        self.kernels.append((begin, begin + duration, whole(arguments.get("correlation")), stream, number))

    def _number(self, collective: Collective) -> int:
        return self.collectives.setdefault(collective, len(self.collectives))

    def profile(self, metadata: dict[str, Any]) -> Profile:
        """The profile of all events taken. metadata: the file's own fields."""
        for index, external, _ in self.unnamed:
            if arguments := self.arguments.get(external):
                self.kernels[index] = (*self.kernels[index][:4], self._number(collective_of(arguments)))
        work = np.concatenate([*self.work_parts, np.array(self.work, WORK)])
        info = metadata.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        self._take_gloo(work, info)
        rank = whole(info.get("rank"))
        match = _NAME.match(self.file.name)
        base_ns = metadata.get("baseTimeNanoseconds")
        profile = Profile(
            file=self.file,
            rank=named if rank == UNKNOWN and (named := named_rank(self.file)) is not None else rank,
            nranks=whole(info.get("world_size")),
            pid=int(match["pid"]) if match and len(match["pid"]) <= 9 else self.pid,
            host=match["host"] if match else "",
            names=[name[:128] for name in self.symbols],
            collectives=list(self.collectives),
            calls=np.concatenate([*self.call_parts, np.array(self.calls, CALL)]),
            work=work,
            kernels=np.array(self.kernels, KERNEL),
            steps=np.array(self.steps, STEP),
            omitted=self.omitted,
            is_cut_off=self.is_cut_off,
        )
        shift(profile, base_ns if type(base_ns) is int and 0 <= base_ns < _LAST_NS else 0)
        return profile


_WANTED = frozenset((*_RUNTIMES, *_KERNELS, *_OPERATORS, "user_annotation"))


def shift(profile: Profile, by_ns: int) -> None:
    """Move all times of a profile."""
    for rows, names in (
        (profile.calls, ("begin_ns",)),
        (profile.work, ("begin_ns", "end_ns")),
        (profile.kernels, ("begin_ns", "end_ns")),
        (profile.steps, ("begin_ns",)),
    ):
        for name in names:
            rows[name] += by_ns
