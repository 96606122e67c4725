"""The sum of totals that several parts of a hub count."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

Totals = TypeVar("Totals", bound=Any)


def total(parts: Sequence[Totals]) -> Totals:
    """The sums of all fields of totals, which are dataclasses of numbers. parts: at least one."""
    kind = type(parts[0])
    return kind(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(kind)})
