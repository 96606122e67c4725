"""The state of this machine in a file next to the node trace: the agent writes it, `stallscope check` reads it."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_FRESH_S = 60.0


@dataclass(frozen=True)
class Saved:
    """at_s: seconds since 1970; the other fields as in NodeState."""

    state: str
    score: float | None
    reason: str
    at_s: float

    @property
    def is_fresh(self) -> bool:
        """Whether an agent that still runs has written it."""
        return time.time() - self.at_s <= _FRESH_S


def path_of(db: Path) -> Path:
    return db.with_name(db.name + ".health.json")


def write(db: Path, saved: Saved) -> None:
    """Replace the file; no effect if the folder does not accept files."""
    path = path_of(db)
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(asdict(saved)))
        part.replace(path)
    except OSError:
        return


def read(db: Path) -> Saved | None:
    """None if no agent with a hub has written it."""
    try:
        return Saved(**json.loads(path_of(db).read_text()))
    except (OSError, ValueError, TypeError):
        return None
