"""Counts in words."""

import re


def counted(n: int, singular: str, plural_form: str = "") -> str:
    """`1 rank`, `2 ranks`, `3,000 processes`. plural_form: needed if the plural is not formed with s or es."""
    plural = plural_form or f"{singular}{'es' if singular.endswith('s') else 's'}"
    return f"{n:,} {singular if n == 1 else plural}"


def counted_reason(n: int, reason: str) -> str:
    """`1 event without a time`, `2 events without a time`, of a reason in either form."""
    noun, *rest = re.split(r" (?=with|of |on |cut |that |in |before |after )", reason, maxsplit=1)
    noun = re.sub(r"ies$", "y", noun) if noun.endswith("ies") else noun.removesuffix("s")
    plural_form = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return " ".join([counted(n, noun, plural_form), *rest])
