"""The hub's page in a headless Chromium: time to draw the heat map, and from its request to its pixels.

Times depend on the machine, so each is also given as a ratio to an empty frame: the time between two animation frames
of an empty page. The endpoint is timed at a hub in this process, from memory and from stored rows. Writes the sizes of
the built files.
"""

import gzip
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from report import report
from tests.page.browsing import chromium, context
from tests.page.jobs import COMM, arrivals, recent_s
from tests.page.servers import served
from tests.store.hub.rows import appended

from stallscope.page.assets import index, script_and_style
from stallscope.page.cells import framed
from stallscope.page.matrix import _stored, matrix

COLUMNS = 600
SIZES = (1_024, 10_240)
REPEATS = 12
_EMPTY_FRAMES = """async () => {
    const out = []
    for (let i = 0; i < 40; i++) {
        const begin = performance.now()
        await new Promise(requestAnimationFrame)
        out.push(performance.now() - begin)
    }
    return out
}"""
_TIMES = """() => {
    const first = name => performance.getEntriesByName(name)[0]
    const draw = first('map-draw')
    return {
        draws: performance.getEntriesByName('map-draw').map(entry => entry.duration),
        pixels_ms: draw.startTime + draw.duration - first('map-request').startTime,
    }
}"""


def frame_of(n_ranks: int) -> bytes:
    """Noisy cells: the slowest to draw and to compress."""
    random = np.random.default_rng(1)
    late = random.integers(0, 200, (n_ranks, COLUMNS), dtype=np.uint8)
    head = {"ranks": n_ranks, "from_ms": int(time.time() - COLUMNS) * 1000, "bucket_ms": 1000, "n": COLUMNS}
    return framed({**head, "seq": [1] * COLUMNS, "comm": [0] * COLUMNS, "comms": [COMM]}, late, late)


def in_browser(hub: Any, browser: Any, n_ranks: int) -> dict[str, float]:
    """Times of one size, in ms."""
    page = context(browser).new_page()
    body = frame_of(n_ranks)
    page.route("**/api/v1/page/matrix*", lambda route: route.fulfill(body=body))
    page.goto(hub.url)
    page.fill("#token", hub.token())
    page.click("text=Sign in")
    page.wait_for_selector("tr.row")
    empty_ms = statistics.median(page.evaluate(_EMPTY_FRAMES))
    page.click("tr.row a")
    page.wait_for_selector("canvas.map[data-painted]")
    page.click("text=Pause")
    for _ in range(REPEATS):
        page.locator("canvas.map").press("+")
        page.wait_for_timeout(80)
        page.locator("canvas.map").press("0")
        page.wait_for_timeout(80)
    times = page.evaluate(_TIMES)
    page.close()
    draw_ms = statistics.median(times["draws"])
    return {
        "empty_frame_ms": round(empty_ms, 2),
        "draw_ms": round(draw_ms, 2),
        "draw_frames": round(draw_ms / empty_ms, 2),
        "request_to_pixels_ms": round(times["pixels_ms"], 1),
        "request_to_pixels_frames": round(times["pixels_ms"] / empty_ms, 1),
    }


def endpoint_ms(hub: Any) -> dict[str, float]:
    """The cells of 256 ranks x 60 s, from memory and from stored rows: median ms."""
    begin_s = recent_s() - 60
    appended(hub.store, collectives=arrivals(256, 120, begin_s=begin_s, cluster="c2", comm=f"{3:016x}"))
    assert hub.page.memory.wait_until_current()
    job = hub.page.memory.job("a", "c2", f"{3:016x}")
    window = {"from_ns": begin_s * 10**9, "to_ns": (begin_s + 60) * 10**9, "n": 60}
    out = {}
    for name, work in (
        ("memory", lambda: matrix(hub.store, hub.page.memory, job, **window)),
        ("stored_rows", lambda: _stored(hub.store, job, *window.values())),
    ):
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1000)
        out[f"{name}_ms"] = round(statistics.median(times), 2)
    return out


def main() -> None:
    script, style = script_and_style()
    sizes = {
        "script_gzip_bytes": len(gzip.compress(script.encode(), 9)),
        "style_gzip_bytes": len(gzip.compress(style.encode(), 9)),
        "html_bytes": len(index()),
    }
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as hub, chromium() as browser:
        appended(hub.store, collectives=arrivals(4, 30, begin_s=recent_s()))
        assert hub.page.memory.wait_until_current()
        ranks = {str(n_ranks): in_browser(hub, browser, n_ranks) for n_ranks in SIZES}
        report("page", {**sizes, "columns": COLUMNS, "by_ranks": ranks, "endpoint": endpoint_ms(hub)})


if __name__ == "__main__":
    main()
