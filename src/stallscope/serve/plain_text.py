"""Untrusted text in answers: without invisible characters, and without the hub's own paths.

Names and texts of traced processes may contain instructions for an assistant, in zero-width or tag characters.
"""

import re
from typing import Any

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Unicode's default-ignorable code points, and characters that change the text direction."""

_PATH = re.compile(r"(?<![\w:/.~-])/(?!api/|v1/|mcp\b|metrics\b)(?:[\w.@%+=~-]+/)+[\w.@%+=~-]*")


def visible(value: Any) -> Any:
    """A JSON value; its texts without invisible characters."""
    if isinstance(value, str):
        return value if value.isascii() else _INVISIBLE.sub("", value)
    if isinstance(value, list):
        return [visible(each) for each in value]
    if isinstance(value, dict):
        return {visible(key): visible(each) for key, each in value.items()}
    return value


def without_paths(message: str) -> str:
    """A message without file paths: clients do not need the hub's folders."""
    return _PATH.sub("<path>", message)
