"""Counts in words."""


def counted(n: int, singular: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`, `3,000 processes`. many: the plural, if it is not the word with an s, or es after an s."""
    plural = many or f"{singular}{'es' if singular.endswith('s') else 's'}"
    return f"{n:,} {singular if n == 1 else plural}"
