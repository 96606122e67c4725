"""The page of a running trace: a golden copy, and its form on terminals of other sizes."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stallscope.events.names import N_CATEGORIES, Category
from stallscope.live.state import OpLine, RankLine
from stallscope.live.terminal_page import Page, VerdictLine, bar, drawn

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def shares(**of: float) -> tuple[float, ...]:
    out = [0.0] * N_CATEGORIES
    for name, share in of.items():
        out[Category[name.upper()] - 1] = share
    return tuple(out)


def rank_line(rank: int, *, late_ms: float = 0.1, worst_ms: float = 0.4, **of: float) -> RankLine:
    return RankLine(
        rank, "host-a", 4000 + rank, "python", 1575, late_ms, worst_ms, shares(**of), is_alive=True
    )


PAGE = Page(
    title="stallscope  /var/lib/stallscope/trace.db  00:01:10  (Ctrl-C ends it)",
    job="4 processes, 1 communicator, 1,575 rounds, 9,586 records",
    system="8 CPUs 41 % busy; memory 12.0 of 64 GiB; tracer 1.2 % of a CPU, 62 MiB",
    ranks=[
        *(rank_line(rank, wait_gpu=0.8, on_cpu=0.2) for rank in (0, 1)),
        rank_line(2, late_ms=0.2, worst_ms=289.4, sleep=0.5, on_cpu=0.3, wait_gpu=0.2),
        rank_line(3, wait_gpu=0.75, on_cpu=0.25),
    ],
    operations=[
        OpLine("all_reduce", 6295, np.arange(101) / 100, None),
        OpLine("synchronise", 1255, np.arange(101.0), 63.9),
        OpLine("allocate, free", 4, np.array([2.0]), 4.59, only_slow=True),
        OpLine("copy", 2514, np.zeros(0), 1200.0, only_slow=True),
    ],
    host_lines=["CPU taken by backup 991: 132 ms in 10 s"],
    verdicts=[
        VerdictLine("02:00:01", True, "Rank 1 on host-a drags the job: 20.0 ms late. Over: 8 quiet steps."),
        VerdictLine("03:57:10", False, "Rank 2 on host-a drags the job: 288.9 ms late every 14 steps."),
    ],
    notes=["tracing into trace.db; Ctrl-C ends it", "attached to 23 functions of libnccl.so.2"],
)


def text(page: Page, width: int = 100, height: int = 40) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(drawn(page, width, height))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def test_the_page_is_as_it_was_when_it_was_looked_at():
    assert text(PAGE) == (GOLDEN / "live_page.txt").read_text()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 250])
@pytest.mark.parametrize("height", [8, 12, 24, 60])
def test_it_fits_terminals_of_other_sizes(width, height):
    lines = text(PAGE, width, height).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("stallscope")


def test_many_ranks_are_cut_to_the_latest_ones_and_the_rest_is_counted():
    late = [rank_line(rank, worst_ms=float(rank)) for rank in range(64)]
    lines = text(Page("t", "j", "s", late, []), 100, 24).splitlines()
    assert len(lines) <= 24
    assert any(line.split()[:1] == ["63"] for line in lines)
    shown = sum("python" in line for line in lines)
    assert f"and {64 - shown} less late processes" in "\n".join(lines)


def test_losses_are_shown_where_the_verdicts_are():
    assert "7 records lost (arrivals 7): verdicts are less certain" in text(
        Page("t", "j", "s", [], [], n_lost=7, lost={"arrivals": 7})
    )


def test_a_bar_shares_its_cells_fairly():
    told = bar(shares(on_cpu=0.5, io=0.25, wait_gpu=0.25), 8).plain
    assert told == "####..II"
    assert bar(shares(), 8).plain == "--------"
    assert len(bar(shares(on_cpu=1 / 3, io=1 / 3, lock=1 / 3), 10).plain) == 10


def test_every_category_has_a_letter_of_its_own():
    from stallscope.events.names import CATEGORY_NAMES

    letters = [bar(shares(**{name: 1.0}), 1).plain for name in CATEGORY_NAMES]
    assert len(set(letters)) == N_CATEGORIES
