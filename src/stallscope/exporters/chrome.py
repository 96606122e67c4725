"""A timeline in the Trace Event Format (JSON), which chrome://tracing, ui.perfetto.dev and speedscope open.

The format has only processes and threads: each process of the timeline becomes a process, each of its tracks a thread.
"""

import json
from collections.abc import Iterator
from typing import Any

from stallscope.exporters.tracks import Slice, Track, TrackSet


def chrome_json(track_set: TrackSet) -> Iterator[str]:
    """The text of the file, one event per line; equal timelines give equal text. Times are us with three decimals."""
    yield '{"displayTimeUnit": "ms",\n'
    clock = {"clock_ns": track_set.clock_ns, "wall_ns": track_set.wall_ns}
    yield f'"otherData": {json.dumps(clock)},\n"traceEvents": [\n'
    separator = ""
    for event in _events(track_set):
        yield separator + json.dumps(event, ensure_ascii=False)
        separator = ",\n"
    yield "\n]}\n"


def _events(track_set: TrackSet) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    for track in track_set.tracks:
        if track.process not in pids:
            pids[track.process] = len(pids) + 1
            yield _named("process_name", pids[track.process], 0, track.process)
            yield {"ph": "M", "pid": pids[track.process], "tid": 0, "name": "process_sort_index"} | {
                "args": {"sort_index": len(pids)}
            }
        pid = pids[track.process]
        if track.slices:
            yield _named("thread_name", pid, track.number, track.name)
        for item in track.slices:
            yield from _slice(item, pid, track)
        for ts_ns, value in track.samples:
            unit = track.unit or "value"
            position = {"pid": pid, "tid": 0, "ts": _us(ts_ns)}
            yield {"ph": "C", "name": track.name, "args": {unit: value}} | position


def _slice(item: Slice, pid: int, track: Track) -> Iterator[dict[str, Any]]:
    position = {"pid": pid, "tid": track.number, "ts": _us(item.ts_ns)}
    yield {
        "ph": "X",
        "name": item.name,
        "cat": track.name,
        "dur": _us(item.duration_ns),
        "args": dict(item.arguments),
    } | position
    for number in item.starts:
        yield {"ph": "s", "id": number, "name": "kept waiting", "cat": "late"} | position
    for number in item.ends:
        yield {"ph": "f", "bp": "e", "id": number, "name": "kept waiting", "cat": "late"} | position


def _named(metadata: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": metadata, "args": {"name": name}}


def _us(ns: int) -> float:
    """Exact to the ns up to 100 days."""
    return ns / 1000
