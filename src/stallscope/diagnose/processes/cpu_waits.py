"""The waits of a thread for a CPU, divided among the work that they delay.

Input: the stacks of samples with their shares of the wall clock. A wait counts for the work with the same stack,
otherwise for the work with the longest common path from the outermost call: another line of the same function, or
another call at the same line of the loop. Accuracy: as good as the samples.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Frames = tuple[str, ...]
"""A stack, innermost frame first."""

_OUTERMOST = "<module>"


class Work(NamedTuple):
    """bucket: its name. line: of the user's code."""

    bucket: str
    line: str


@dataclass
class CpuWaits:
    """The samples so far. _work: by each path that leads to the work."""

    _work: dict[Frames, dict[Work, float]] = field(default_factory=lambda: defaultdict(dict))
    _waits: list[tuple[Frames, float, str]] = field(default_factory=list)

    def add_work(self, frames: Frames, bucket: str, line: str, share: float) -> None:
        """A sample of a thread that does not wait for a CPU."""
        work = Work(bucket, line)
        for path in _paths(frames):
            self._work[path][work] = self._work[path].get(work, 0.0) + share

    def add_wait(self, frames: Frames, share: float, *, of: str = "") -> None:
        """A sample of a thread that waits for a CPU. of: the bucket of its work, if it is known."""
        self._waits.append((frames, share, of))

    def divided(self) -> Iterator[tuple[str, str, float]]:
        """Bucket, line and share of each wait whose work is known."""
        for frames, share, bucket in self._waits:
            of_path = next((self._work[path] for path in _paths(frames) if path in self._work), {})
            known = {work: own for work, own in of_path.items() if bucket in ("", work.bucket)}
            for work, own in known.items():
                yield work.bucket, work.line, share * own / sum(known.values())


def _paths(frames: Frames) -> Iterator[Frames]:
    """A stack, and its outer parts that do not begin with a module's own code, the longest first."""
    for i in range(len(frames)):
        if i and frames[i].endswith(_OUTERMOST):
            return
        yield frames[i:]
