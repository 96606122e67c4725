"""Removes the names of hosts, users and folders from a trace, so that it can be shown to others.

Hosts become node0, node1 and so on; a path keeps only the file's name. Numbers, operations and errors stay.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.trace import Coverage, Gap, Trace

_FOLDERS = re.compile(r"(?:(?<![\w.])[A-Za-z]:)?(?:[\\/][^\s\\/:()<>'\"|,;]+)*[\\/](?=[^\s\\/:()<>'\"|,;]+)")
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_USER = re.compile(r"(?:(?<=user=)|(?<=USER=)|(?<=user ))\S+")


def redacted(trace: Trace) -> Trace:
    """The trace with host names, addresses, user names and folders replaced."""
    names = {name: f"node{i}" for i, name in enumerate(trace.nodes) if name}
    clean = _cleaner(names)
    return replace(
        trace,
        nodes=tuple(names.get(name, name) for name in trace.nodes),
        stacks={number: tuple(clean(frame) for frame in frames) for number, frames in trace.stacks.items()},
        source=clean(trace.source),
        facts={key: clean(value) for key, value in trace.facts.items()},
        annotations=_cleaned(trace.annotations, ("value",), clean),
        host_events=_cleaned(trace.host_events, ("file", "detail"), clean),
        coverage=Coverage(
            blind_spots=trace.coverage.blind_spots,
            omitted=trace.coverage.omitted,
            gaps=tuple(Gap(clean(gap.reason), clean(gap.action)) for gap in trace.coverage.gaps),
        ),
    )


def _cleaner(names: dict[str, str]) -> Callable[[str], str]:
    hosts = (
        re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))
        if names
        else None
    )

    def clean(text: str) -> str:
        if hosts is not None:
            text = hosts.sub(lambda match: names[match[0]], text)
        return _USER.sub("USER", _ADDRESS.sub("ADDRESS", _FOLDERS.sub("", text)))

    return clean


def _cleaned(rows: Array, columns: tuple[str, ...], clean: Callable[[str], str]) -> Array:
    out = rows.copy()
    for column in columns:
        for value in np.unique(out[column]).tolist():
            out[column][rows[column] == value] = clean(value.decode("utf-8", "replace")).encode()
    return out
