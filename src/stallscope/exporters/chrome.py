"""A timeline in the Trace Event Format (JSON), which chrome://tracing, ui.perfetto.dev and speedscope open.

The format has only processes and threads: each process of the timeline becomes a process, each of its tracks a thread.
"""

import json
from collections.abc import Iterator
from typing import Any

from stallscope.exporters.tracks import Slice, Story, Track


def chrome_json(story: Story) -> Iterator[str]:
    """The text of the file, one event per line; equal timelines give equal text. Times are us with three decimals."""
    yield '{"displayTimeUnit": "ms",\n'
    yield f'"otherData": {json.dumps({"clock_ns": story.clock_ns, "wall_ns": story.wall_ns})},\n"traceEvents": [\n'
    separator = ""
    for event in _events(story):
        yield separator + json.dumps(event, ensure_ascii=False)
        separator = ",\n"
    yield "\n]}\n"


def _events(story: Story) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    for track in story.tracks:
        if track.process not in pids:
            pids[track.process] = len(pids) + 1
            yield _named("process_name", pids[track.process], 0, track.process)
            yield {"ph": "M", "pid": pids[track.process], "tid": 0, "name": "process_sort_index"} | {
                "args": {"sort_index": len(pids)}
            }
        pid = pids[track.process]
        if track.slices:
            yield _named("thread_name", pid, track.number, track.name)
        for one in track.slices:
            yield from _slice(one, pid, track)
        for ts_ns, value in track.samples:
            unit = track.unit or "value"
            where = {"pid": pid, "tid": 0, "ts": _us(ts_ns)}
            yield {"ph": "C", "name": track.name, "args": {unit: value}} | where


def _slice(one: Slice, pid: int, track: Track) -> Iterator[dict[str, Any]]:
    where = {"pid": pid, "tid": track.number, "ts": _us(one.ts_ns)}
    yield {
        "ph": "X",
        "name": one.name,
        "cat": track.name,
        "dur": _us(one.duration_ns),
        "args": dict(one.told),
    } | where
    for number in one.starts:
        yield {"ph": "s", "id": number, "name": "kept waiting", "cat": "late"} | where
    for number in one.ends:
        yield {"ph": "f", "bp": "e", "id": number, "name": "kept waiting", "cat": "late"} | where


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _us(ns: int) -> float:
    """Exact to the ns up to 100 days."""
    return ns / 1000
