"""The view of inference servers in Chromium: open requests and endpoints of a hub, in light and dark."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stallscope.events.histograms import histogram
from stallscope.store.hub.schema import TABLES

from ..store.hub.rows import appended
from .servers import Served, served

pytestmark = [pytest.mark.browser, pytest.mark.live]
pytest.importorskip("playwright.sync_api", reason="browser: no playwright")

from .browsing import Problems, chromium, context, has_axe, signed_in, violations  # noqa: E402

S = 1_000_000_000
MODEL = "meta-llama/Llama-3.1-70B-Instruct"


def table(name: str, row: dict[str, object]) -> pa.Table:
    """A row with all columns of a table of the hub."""
    columns = {column.name: row.get(column.name) for column in TABLES[name].columns}
    return pa.Table.from_pylist([{name: value for name, value in columns.items() if value is not None}])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hub")) as running:
        now_ns = time.time_ns()
        lengths = histogram(np.array([20.0, 25.0, 900.0]) * 1e6).decode()
        own: dict[str, Any] = {"cluster_id": "alpha", "node_id": "node-1", "pid": 7, "engine": "vllm"}
        own |= {"model": MODEL, "ts_ns": now_ns - S}
        counts = {"n": 300, "n_failed": 2, "n_aborted": 1, "n_tokens": 3000}
        times = {"first": lengths, "whole": lengths, "between": lengths}
        stuck = {"group_pid": 7, "n_open": 3, "n_full": 1, "oldest_path": "/v1/completions"}
        stuck |= {"oldest_ns": now_ns - 9 * S, "oldest_progress_ns": now_ns - 9 * S}
        appended(
            running.store, latencies=table("latencies", own | counts | times | {"path": "/v1/completions"})
        )
        appended(running.store, servers=table("servers", own | stuck))
        yield running


def test_the_view_has_open_requests_and_endpoints(hub: Served, tmp_path: Path):
    problems = Problems(hub.url)
    with chromium() as chrome:
        page = signed_in(context(chrome), hub, problems)
        page.click("nav >> text=Servers")
        page.wait_for_selector("h2:has-text('3 open requests')")
        waiting = page.locator("div[aria-label='Open requests'] tbody").inner_text()
        assert "node-1 7" in waiting and "the first token, since 8 s" in waiting
        cells = page.locator("div[aria-label=Endpoints] tbody td").all_inner_texts()
        assert f"{MODEL} /v1/completions" in cells[0]
        # p50, p99, p99.9 of the time to the first token, at most 9 % too large
        assert cells[5:8] == ["25.3 ms", "961.5 ms", "961.5 ms"]
        found = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=tmp_path / f"{scheme}.png")
            found += violations(page) if has_axe() else []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        tables = "[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth - each.clientWidth)"
        assert max(page.evaluate(tables)) <= 0  # of 1,280 pixels
    assert (found, problems.found) == ([], [])
