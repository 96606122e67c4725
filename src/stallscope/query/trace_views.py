"""Views that every query on a node trace can use: answers to questions that join several tables."""

import sqlite3
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class View:
    """A SELECT in sql/NAME.sql. meaning: of a row. columns: their meanings, in order; empty if the name is sufficient.

    tables: that it reads. A trace of an earlier version may lack them, and then the view.
    """

    name: str
    meaning: str
    tables: tuple[str, ...]
    columns: dict[str, str]


VIEWS = (
    View(
        "hand_overs",
        "A process of an inference engine wakes a thread of another of its processes that has waited 1 ms or more.",
        ("offcpu", "servers"),
        {
            "node": "number of the event's node; its name is in `nodes`",
            "ts_ns": "the wakeup",
            "from_pid": "process that woke the thread",
            "from_tid": "thread that woke it",
            "pid": "process of the thread that waited",
            "tid": "the thread that waited",
            "waited_ns": "before the wakeup",
            "pickup_ns": "from the wakeup until the thread ran",
        },
    ),
)


def statement(view: View) -> str:
    """The SELECT of a view."""
    return files("stallscope.query").joinpath("sql", f"{view.name}.sql").read_text()


def add_views(db: sqlite3.Connection) -> None:
    """Create the views on this connection only. The file is not changed."""
    existing = {name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
    for view in VIEWS:
        if existing.issuperset(view.tables) and view.name not in existing:
            db.execute(f"CREATE TEMP VIEW {view.name} AS {statement(view)}")
