"""The page of a running trace: a golden copy, and its form on terminals of other sizes."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stallscope.events.names import N_CATEGORIES, Category
from stallscope.live.job_totals import HEAT_S, OpLine, RankLine
from stallscope.live.page_view import Panel, View
from stallscope.live.terminal_page import Page, VerdictLine, bar, drawn, heat

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def shares(**of: float) -> tuple[float, ...]:
    out = [0.0] * N_CATEGORIES
    for name, share in of.items():
        out[Category[name.upper()] - 1] = share
    return tuple(out)


def rank_line(rank: int, *, late_ms: float = 0.1, worst_ms: float = 0.4, **of: float) -> RankLine:
    return RankLine(
        rank,
        "host-a",
        4000 + rank,
        "python",
        1575,
        late_ms,
        worst_ms,
        shares(**of),
        is_alive=True,
        heat_ms=tuple(
            None if second < 60 else worst_ms if second % 14 == 3 else late_ms for second in range(HEAT_S)
        ),
    )


PAGE = Page(
    title="stallscope  /var/lib/stallscope/trace.db  00:01:10",
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
        VerdictLine(
            "02:00:01", True, "Rank 1 on host-a slows down the job: 20.0 ms late. Over: 8 quiet steps."
        ),
        VerdictLine("03:57:10", False, "Rank 2 on host-a slows down the job: 288.9 ms late every 14 steps."),
    ],
    notes=["tracing into trace.db; Ctrl-C ends it", "attached to 23 functions of libnccl.so.2"],
)


def text(page: Page, width: int = 100, height: int = 40, view: View | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(drawn(page, width, height, view))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 50)])
def test_the_page_equals_its_inspected_copy(width, height):
    assert text(PAGE, width, height, View()) == (GOLDEN / f"live_page_{width}x{height}.txt").read_text()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 250])
@pytest.mark.parametrize("height", [8, 12, 24, 60])
@pytest.mark.parametrize("panel", Panel)
def test_it_fits_terminals_of_other_sizes(width, height, panel):
    lines = text(PAGE, width, height, View(panel=panel)).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("stallscope")
    assert len(lines) < height


@pytest.mark.parametrize("height", [10, 14, 24])
def test_the_culprit_and_the_verdict_are_always_on_the_page(height):
    ranks = [rank_line(rank, worst_ms=500.0 if rank == 61 else 1.0) for rank in range(64)]
    lines = text(replace(PAGE, ranks=ranks, host_lines=["x"] * 4), 80, height, View()).splitlines()
    assert any("Rank 2 on host-a" in line for line in lines[:6])
    assert any(line.split()[:1] == ["61"] for line in lines)
    assert len(lines) < height


def test_many_ranks_are_cut_to_the_latest_and_the_rest_is_counted():
    late = [rank_line(rank, worst_ms=float(rank)) for rank in range(64)]
    lines = text(Page("t", "j", "s", late, []), 100, 24).splitlines()
    ranks = [line.split()[0] for line in lines if "python" in line]
    assert ranks == [str(rank) for rank in range(63, 63 - len(ranks), -1)]
    assert f"and {64 - len(ranks)} more" in "\n".join(lines)


def test_helper_processes_are_counted_and_not_listed():
    helpers = [replace(rank_line(-1, worst_ms=0.0), pid=9000 + i, n_rounds=0, job=-1) for i in range(3)]
    lines = text(replace(PAGE, ranks=[*PAGE.ranks, *helpers]), 80, 24)
    assert "and 3 helper processes without collectives" in lines
    assert "9000" not in lines


def test_two_jobs_are_two_tabs():
    other = [replace(rank_line(rank), pid=7000 + rank, job=1) for rank in range(2)]
    page = replace(PAGE, ranks=[*PAGE.ranks, *other])
    first, second = (text(page, 100, 30, View(job=job)) for job in (0, 1))
    assert "1: 4 ranks" in first and "2: 2 ranks" in first
    assert "4000" in first and "7000" not in first
    assert "7000" in second and "4000" not in second


def test_the_ledger_of_a_rank_is_a_bar_for_each_category():
    lines = text(PAGE, 80, 24, View(panel=Panel.LEDGER, selected=4002)).splitlines()
    (sleep,) = [line for line in lines if line.startswith("sleep")]
    (cpu,) = [line for line in lines if line.startswith("on_cpu")]
    assert "50.0 %" in sleep and sleep.count("#") > cpu.count("#") > 0


def test_the_heat_strip_has_a_mark_for_each_second():
    assert heat([None, 0.5, 2.0, 5.0, 20.0, 90.0], 6).plain == " .-=+#"
    assert heat([0.5, 90.0], 1).plain == "#"


def test_the_last_screen_shows_ended_ranks_and_the_verdict():
    ended = [replace(line, is_alive=False) for line in PAGE.ranks]
    lines = text(replace(PAGE, ranks=ended), 80, 60, None)
    assert "python 4002 ended" in lines and "Rank 2 on host-a" in lines and "q end" not in lines


def test_the_last_screen_shows_every_job_and_every_verdict_in_full():
    other = [replace(rank_line(rank), pid=7000 + rank, job=1) for rank in range(2)]
    long = VerdictLine("03:58:00", True, "Rank 1 of the other job is late. " + "word " * 40 + "end.")
    page = replace(PAGE, ranks=[*PAGE.ranks, *other], verdicts=[*PAGE.verdicts, long])
    lines = text(page, 80, 60, None)
    assert "job 1: 4 ranks" in lines and "job 2: 2 ranks" in lines
    assert "4002" in lines and "7001" in lines and "word end." in lines


def test_the_verdict_on_the_selected_job_is_the_first():
    other = [replace(rank_line(rank), pid=7000 + rank, job=1) for rank in range(2)]
    verdicts = [
        VerdictLine("03:57:10", False, "Rank 2 is late.", pids=(4002,)),
        VerdictLine("03:58:10", False, "Rank 1 is late.", pids=(7001,)),
    ]
    page = replace(PAGE, ranks=[*PAGE.ranks, *other], verdicts=verdicts)
    for job, shown, hidden in ((0, "Rank 2", "Rank 1"), (1, "Rank 1", "Rank 2")):
        lines = text(page, 60, 15, View(job=job))
        assert f"{shown} is late" in lines and f"{hidden} is late" not in lines


def test_the_keys_of_a_panel_are_on_the_page():
    ranks, explain = (text(PAGE, 80, 24, View(panel=panel)) for panel in (Panel.RANKS, Panel.EXPLAIN))
    for words in ("q end", "? help", "s sort: worst lateness", "space pause", "enter ledger", "e explain"):
        assert words in ranks
    assert "esc back" in explain and "up/down scroll" in explain
    assert "q end" in text(PAGE, 80, 12, View())


def test_losses_are_shown_next_to_the_verdicts():
    assert "7 records lost (arrivals 7): verdicts are less certain" in text(
        Page("t", "j", "s", [], [], n_lost=7, lost={"arrivals": 7})
    )


def test_a_bar_shares_its_cells_fairly():
    plain = bar(shares(on_cpu=0.5, io=0.25, wait_gpu=0.25), 8).plain
    assert plain == "####..II"
    assert bar(shares(), 8).plain == "--------"
    assert len(bar(shares(on_cpu=1 / 3, io=1 / 3, lock=1 / 3), 10).plain) == 10


def test_every_category_has_a_letter_of_its_own():
    from stallscope.events.names import CATEGORY_NAMES

    letters = [bar(shares(**{name: 1.0}), 1).plain for name in CATEGORY_NAMES]
    assert len(set(letters)) == N_CATEGORIES
