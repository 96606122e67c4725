"""The events of a Chrome trace in blocks of about a megabyte, so that memory stays low."""

import json
import re
from collections.abc import Iterator
from typing import Any

_BLOCK = 1 << 20
_SPACE = re.compile(r"[\s,]*")
_CLOSE = re.compile(r"\}\s*,\s*(?=\{)")


def event_blocks(text: str, at: int) -> Iterator[tuple[list[Any] | None, int]]:
    """The events in blocks with the position after each; None for events where the text ends in the middle."""
    decoder = json.JSONDecoder(strict=False)
    singly_until = 0
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            yield [], at + 1
            return
        if at >= singly_until:
            block, end = _block(text, at)
            if block:
                yield block, end
                at = end
                continue
            singly_until = at + _BLOCK
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            yield None, len(text)
            return
        yield [event], at


def _block(text: str, at: int) -> tuple[list[Any], int]:
    """About a megabyte of events decoded at once; none where that part of the text is not a list of events."""
    match = _CLOSE.search(text, at + _BLOCK)
    if match is None:
        return [], at
    try:
        return json.loads(f"[{text[at : match.start() + 1]}]", strict=False), match.end()
    except ValueError:  # the place is inside an event, or an event is damaged
        return [], at
