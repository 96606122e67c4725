"""Counts in words."""


def counted(n: int, singular: str, plural_form: str = "") -> str:
    """`1 rank`, `2 ranks`, `3,000 processes`. plural_form: needed if the plural is not formed with s or es."""
    plural = plural_form or f"{singular}{'es' if singular.endswith('s') else 's'}"
    return f"{n:,} {singular if n == 1 else plural}"
