"""The agent's soak in short: nothing piles up, and its arithmetic is right."""

from pathlib import Path

import bench_soak
import numpy as np
import pytest

MAX_MB = 6
"""SQLite's cache of pages may still fill, and the first of each kind of work is done."""


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_an_agent_does_not_grow_while_processes_come_and_go(tmp_path: Path):
    samples, cost = bench_soak.soaked(tmp_path, 15, n_ranks=2, every_s=0.75, visit_every_s=3)
    later = bench_soak.settled(samples)
    first, last = later[: len(later) // 2], later[len(later) // 2 :]
    assert cost.n_visits >= 3
    assert samples[-1].n_rows > 0
    for name in ("n_fds", "n_threads", "n_maps", "n_links", "n_programs"):
        then, now = (min(getattr(each, name) for each in part) for part in (first, last))
        assert now <= then, name
    assert min(each.rss_mb for each in last) <= max(each.rss_mb for each in first) + MAX_MB


def test_a_slope_is_that_of_most_pairs():
    at_s = np.arange(100.0)
    jumping = 2 * at_s + np.where(at_s % 10 == 3, 500, 0)
    assert bench_soak.slope(at_s, jumping) == pytest.approx(2, abs=0.1)
    assert bench_soak.slope(at_s[:1], jumping[:1]) == 0
