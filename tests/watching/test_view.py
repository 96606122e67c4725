"""Keys of the page: their names, and the view after each."""

import pytest

from stallscope.live.keyboard import named
from stallscope.live.page_view import HELP, Order, Panel, View, ordered

from .test_page import rank_line

PIDS = [4003, 4001, 4002]


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1b", ["escape"]),
        (b"\ts \r", ["tab", "s", " ", "enter"]),
        (b"\x1b[6~j", ["page down", "j"]),
        (b"\x1b[15~", []),
        (b"\x00\xff", []),
    ],
)
def test_bytes_of_a_terminal_have_names(data, keys):
    assert named(data) == keys


def test_the_order_goes_round():
    view = View()
    observed = []
    for _ in Order:
        observed.append(view.order)
        view = view.after("s", PIDS, 1)
    assert observed == list(Order) and view == View()


def test_space_pauses_and_continues():
    assert View().after(" ", PIDS, 1).is_paused
    assert View().after(" ", PIDS, 1).after(" ", PIDS, 1) == View()


@pytest.mark.parametrize(("key", "panel"), [("?", Panel.HELP), ("e", Panel.EXPLAIN), ("enter", Panel.LEDGER)])
def test_a_panel_opens_and_closes(key, panel):
    view = View().after(key, PIDS, 1)
    assert view.panel is panel
    assert view.after(key, PIDS, 1).panel is Panel.RANKS
    assert view.after("escape", PIDS, 1).panel is Panel.RANKS


def test_arrows_select_ranks_and_stop_at_the_ends():
    view = View().after("down", PIDS, 1)
    assert view.selected == 4001
    for _ in range(5):
        view = view.after("down", PIDS, 1)
    assert view.selected == 4002
    assert view.after("up", PIDS, 1).selected == 4001
    assert View().after("down", [], 0) == View()


def test_arrows_scroll_a_report():
    view = View(panel=Panel.EXPLAIN).after("down", PIDS, 1)
    assert (view.top, view.after("up", PIDS, 1).after("up", PIDS, 1).top) == (1, 0)


def test_tab_shows_the_next_job_and_returns_to_the_first():
    assert [View().after("tab", PIDS, 2).job, View(job=1).after("tab", PIDS, 2).job] == [1, 0]


def test_every_key_of_the_help_changes_the_view():
    keys = {"q": None, "up, down": "down", "? or h": "?"}
    for name, _ in HELP:
        key = keys.get(name.strip(), {"space": " "}.get(name, name))
        if key is not None:
            assert View().after(key, PIDS, 2) != View(), name


def test_ranks_are_ordered_by_lateness_or_number():
    lines = [rank_line(0, worst_ms=1), rank_line(1, worst_ms=9), rank_line(2, late_ms=5, worst_ms=5)]
    assert [line.rank for line in ordered(lines, Order.WORST)] == [1, 2, 0]
    assert next(line.rank for line in ordered(lines, Order.LATE)) == 2
    assert [line.rank for line in ordered(lines, Order.RANK)] == [0, 1, 2]
