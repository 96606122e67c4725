"""Runs cases in a seeded random order and appends each result to a file: a later run continues there.

The cases that are done at any time are a random sample of all cases.
"""

import pickle
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from simulated import Spread

Item = TypeVar("Item")
Result = TypeVar("Result")

_ORDER_SEED = 1


class Journal(NamedTuple):
    """The results of one part at one commit, by case. minutes: no case starts later."""

    path: Path
    minutes: float

    def spread(self) -> Spread:
        """A function like simulated.spread: runs the cases that the file lacks, in this process."""

        def run(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("r+b") as file:
                return self._run(file, work, list(items))

        return run

    def _run(self, file: BinaryIO, work: Callable[[Item], Result], items: list[Item]) -> list[Result]:
        results = _read(file)
        until_s = time.monotonic() + 60 * self.minutes
        for item in random.Random(_ORDER_SEED).sample(items, len(items)):
            if item in results:
                continue
            if time.monotonic() > until_s:
                break
            results[item] = work(item)
            pickle.dump((item, results[item]), file)
            file.flush()
        return [results[item] for item in items if item in results]


def _read(file: BinaryIO) -> dict[Any, Any]:
    """The results in a file; a result that was cut at the end is removed from the file."""
    results: dict[Any, Any] = {}
    end = 0
    while True:
        try:
            item, result = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            file.seek(end)
            file.truncate()
            return results
        results[item], end = result, file.tell()
