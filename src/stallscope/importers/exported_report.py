"""Files that stallscope itself exported: Perfetto and Chrome timelines, and incident spans in OTLP's JSON.

A timeline holds tracks for people, not the events of the trace. Its track "verdicts" states the answer of the report,
and that answer is repeated. OTLP: lines of JSON as the file exporter of a collector writes them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace, remedy_for_extra
from stallscope.events import layout
from stallscope.events.exported_verdicts import EXPORTED, ExportedVerdict, as_fact
from stallscope.events.trace import Trace
from stallscope.importers.registry import Importer, Unread, each_readable
from stallscope.importers.texts import lines_of, opened, text_of

_MAX_BYTES = 512 << 20
_TRACK = "verdicts"
_CAUSE = re.compile(r"(\w+) (\d+)%")


def _accepts(file: Path, head: bytes) -> bool:
    is_chrome = b'"otherData": {"clock_ns"' in head[:400]
    is_perfetto = head[:1] == b"\n" and _TRACK.encode() in head[:4096]
    return is_chrome or is_perfetto or (b'"resourceSpans"' in head and b'"stallscope' in head)


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    verdicts = [verdict for part in each_readable(files, _verdicts, unread) for verdict in part]
    if not verdicts:
        raise BadTrace(f"{files[0]} contains no verdict: export the trace again")
    ranks = sorted({rank for verdict in verdicts for rank in verdict.ranks})
    processes = layout.empty(layout.PROCESSES, len(ranks))
    processes["pid"], processes["rank"] = np.array(ranks, np.int64), np.array(ranks, np.int64)
    return Trace(
        processes=processes,
        nodes=("",),
        source=f"verdicts in {len(files)} exported file{'s' * (len(files) > 1)} of stallscope",
        facts={EXPORTED: as_fact(verdicts)},
    )


def _verdicts(file: Path) -> list[ExportedVerdict]:
    """The verdicts of one file. Raises BadTrace."""
    with opened(file) as stream:
        is_perfetto = stream.read(1) == b"\n"
    try:
        if is_perfetto:
            return [_of_timeline(arguments) for arguments in _perfetto_slices(file)]
        text = text_of(file, _MAX_BYTES)
        if '"resourceSpans"' in text[:65536]:
            return [v for line in lines_of(file) if line.strip() for v in _spans(json.loads(line))]
        events = json.loads(text)["traceEvents"]
        return [
            _of_timeline(e["args"])
            for e in events
            if e.get("ph") == "X" and e.get("cat", "").startswith(_TRACK)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:120]
        raise BadTrace(f"{file} is a damaged export ({reason}): export the trace again") from error


def _of_timeline(arguments: Mapping[str, Any]) -> ExportedVerdict:
    """A slice of the track of verdicts."""
    cost = arguments.get("gpu_seconds")
    return ExportedVerdict(
        kind=str(arguments["kind"])[:40],
        summary=str(arguments["summary"])[:2000],
        ranks=_ranks(str(arguments.get("ranks", ""))),
        confidence=float(arguments.get("confidence", 0.0)),
        causes=[(name, int(share) / 100) for name, share in _CAUSE.findall(str(arguments.get("cause", "")))],
        gpu_seconds=None if cost is None else float(cost),
    )


def _ranks(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d{1,6}", text)[:4096]]


def _spans(value: dict[str, Any]) -> Iterator[ExportedVerdict]:
    """The incidents in one request."""
    spans = (
        s for r in value["resourceSpans"] for scope in r.get("scopeSpans", ()) for s in scope.get("spans", ())
    )
    for span in spans:
        values = {a["key"]: next(iter(a["value"].values())) for a in span.get("attributes", ())}
        if "stallscope.kind" not in values:
            continue
        ranks = values.get("stallscope.ranks", "")
        listed = ranks.get("values", ()) if isinstance(ranks, dict) else ranks
        cause = values.get("stallscope.cause")
        yield ExportedVerdict(
            kind=str(values["stallscope.kind"])[:40],
            summary=str(span.get("status", {}).get("message", span.get("name", "")))[:2000],
            ranks=_ranks(str(listed)),
            confidence=float(values.get("stallscope.confidence", 0.0)),
            causes=[(str(cause), 1.0)] if cause else [],
        )


def _perfetto_slices(file: Path) -> Iterator[dict[str, Any]]:
    """The arguments of the slices of the track of verdicts. Raises BadTrace without the perfetto package."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError:
        raise BadTrace(f"{file} needs the perfetto package: {remedy_for_extra('export')}") from None
    with opened(file) as stream:
        packets = perfetto_trace_pb2.Trace.FromString(stream.read(_MAX_BYTES)).packet
    tracks: set[int] = set()
    names: dict[int, str] = {}
    for packet in packets:
        if packet.HasField("track_descriptor") and packet.track_descriptor.name.startswith(_TRACK):
            tracks.add(packet.track_descriptor.uuid)
        names |= {word.iid: word.name for word in packet.interned_data.debug_annotation_names}
        event = packet.track_event
        if event.track_uuid in tracks and event.debug_annotations:
            yield {names[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}


IMPORTER = Importer("timeline or incidents exported by stallscope", _accepts, _read)
