"""The rank that a file's name or its folder's name states: dump_3, rank6_attempt2.pkl, rank0/trace.json."""

import re
from pathlib import Path

_RANK = re.compile(r"(?:rank|(?<![a-z])r)[-_ .=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def ranks_in_name(file: Path) -> list[int]:
    """The numbers that may be the file's rank, the likeliest first.

    A number that follows "rank" comes first, then the other numbers of the file's name from its end, then the same of
    the folder's name.
    """
    return [*_numbers(file.name), *_numbers(file.parent.name)]


def named_rank(file: Path) -> int | None:
    """The number that follows "rank" in the file's name, otherwise in a folder's name; None without such a number."""
    for name in (file.name, *(parent.name for parent in list(file.parents)[:3])):
        if match := _RANK.search(name):
            return int(match[1])
    return None


def _numbers(name: str) -> list[int]:
    words = [*_RANK.findall(name), *reversed(_NUMBER.findall(name))]
    return [int(word) for word in words if len(word) <= 7]
