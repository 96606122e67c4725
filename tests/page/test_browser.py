"""The page in Chromium, over a hub whose jobs are known: each proof of its design that needs a browser."""

import csv
import gzip
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stallscope.events import layout
from stallscope.events.trace import Clock
from stallscope.exporters import hub_arrow, hub_batches
from stallscope.page.assets import script_and_style
from stallscope.receive import arrow
from stallscope.stress import load

from ..alerts.builders import config, incident
from ..store.hub.rows import appended
from .jobs import COMM, MS, S, arrivals, job_row, recent_s, verdict_row
from .servers import Served, served

pytestmark = [pytest.mark.browser, pytest.mark.live]
playwright = pytest.importorskip("playwright.sync_api", reason="browser: no playwright")

from .browsing import (  # noqa: E402  (imports playwright)
    Problems,
    chromium,
    context,
    has_axe,
    open_job,
    row_colours,
    signed_in,
    until,
    violations,
)

N_RANKS, CULPRIT, LATE_MS = 1024, 517, 60
EU_COMM = f"{7:016x}"
SENT_EPOCH_S = 1_760_000_000  # of incident()
IMAGE = "<img src=x onerror=alert(1)>"


LARGE = load.Job(
    name="llama",
    ranks=N_RANKS,
    first_rank=0,
    world=N_RANKS,
    interval_ns=500_000_000,
    straggler=CULPRIT,
    late_ns=LATE_MS * 10**6,
)
LARGE_COMM = f"{LARGE.comm_hash:016x}"
RANKS = {1000 + rank: (rank, rank) for rank in range(N_RANKS)}


def large_rows(hub: Served, first: int, n: int, origin: int) -> None:
    """Rounds of a job of 1,024 ranks with one straggler, as `stallscope stress` sends them."""
    for begin in range(first, first + n, 20):
        rows = load.collectives(LARGE, begin, min(20, first + n - begin), origin_round=origin)
        sent = hub_batches.on_wall_clock(layout.COLLECTIVES, rows, Clock(0, 0, 0), ("",), ranks=RANKS)
        body = hub_arrow.request(
            {"collectives": sent}, batch_id=f"{begin}", node="gpu-a", cluster="llama-70b", about={}
        )
        hub.store.append(arrow.decode(body, "a", limit=1 << 28)).result(60)


@contextmanager
def fed(hub: Served) -> Iterator[None]:
    """Two jobs that send rounds inside the with block, after half a minute of rounds: one slow, one healthy."""
    ended = threading.Event()
    origin = load.rounds_until(LARGE, time.time_ns()) - 60
    begin_s = recent_s()
    large_rows(hub, origin, 60, origin)
    eu = {"cluster": "eu", "comm": EU_COMM, "first_pid": 900, "node": "eu-1"}
    eu_rows = arrivals(4, 40, begin_s=begin_s, **eu)
    appended(hub.store, collectives=eu_rows)
    members = json.dumps([["gpu-a", 1000 + rank, rank] for rank in range(N_RANKS)])
    large = {"cluster_id": "llama-70b", "job": LARGE_COMM, "members": members, "n_ranks": N_RANKS}
    appended(hub.store, jobs=job_row(eu_rows))
    appended(hub.store, jobs=job_row(eu_rows, answer="found", **large))

    def send() -> None:
        next_round, n_eu = origin + 60, 40
        while not ended.wait(1.0):
            due = load.rounds_until(LARGE, time.time_ns()) - next_round
            if due > 0:
                large_rows(hub, next_round, due, origin)
                next_round += due
            n = (time.time_ns() // S - begin_s) * 2
            if n > n_eu:
                rows = arrivals(4, n - n_eu, begin_s=begin_s + n_eu // 2, first_seq=n_eu, **eu)
                appended(hub.store, collectives=rows)
                n_eu = n

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    health = {"otlp_grpc_port": 14317}
    with served(tmp_path_factory.mktemp("hub"), health=lambda _: health) as running, fed(running):
        named = {"cluster_id": "llama-70b", "comm_hash": LARGE_COMM, "rank": CULPRIT, "ranks": f"[{CULPRIT}]"}
        victims = json.dumps([rank for rank in range(N_RANKS) if rank != CULPRIT])
        summary = f"Rank {CULPRIT} slows down the job: 60 ms late."
        row = verdict_row(
            **named, pids="[]", summary=summary, verdict_id="large", victims=victims, late_ms=60.0
        )
        appended(running.store, verdicts=row)
        assert running.page.memory.wait_until_current()
        yield running


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def browser(chrome: Any) -> Iterator[Any]:
    """Makes browser contexts, and closes them: an open page polls its hub."""
    yield chrome
    for opened in list(chrome.contexts):
        opened.close()


@pytest.fixture
def problems(hub: Served) -> Iterator[Problems]:
    """Fails the test where a page had a console error, an exception, a dialog or an external request."""
    noted = Problems(hub.url)
    yield noted
    assert noted.found == []


@pytest.mark.pure
def test_the_built_files_are_within_their_budgets():
    script, style = script_and_style()
    assert len(gzip.compress(script.encode(), 9)) < 40_000
    assert len(gzip.compress(style.encode(), 9)) < 5_000


def test_sign_in_lists_the_worst_job_first_and_a_click_shows_the_culprit(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems)
    page.wait_for_selector("tr.row >> nth=1")
    first = page.locator("tr.row").first.inner_text()
    assert "straggler" in first and "llama-70b" in first and f"rank {CULPRIT}" in first
    assert "1 of 2 jobs is slowed down or stopped" in page.locator("h1").inner_text()
    open_job(page, "llama-70b")
    page.wait_for_selector("dd:has-text('1,023')")  # the details of the verdict follow its row
    card = page.locator("section[aria-label=Verdict]").inner_text()
    with hub.signed_in() as client:
        (wanted,) = client.post("/api/v1/tools/fleet.cluster.verdicts", json={"cluster": "llama-70b"}).json()[
            "rows"
        ]
    # The card shows the numbers of the tool.
    assert wanted["summary"] in card and f"{wanted['late_ms']:g} ms" in card
    assert f"{len(wanted['victims']):,}" in card and f"{wanted['confidence']:.0%}".replace("%", " %") in card
    assert "0.5 to 1" in card  # 30 to 60 GPU seconds in 60 s
    page.wait_for_selector("text=Time ledger of the newest late step")
    assert "sleep +60 ms" in page.locator("section[aria-label=Evidence]").inner_text()
    # The mean time ledger of the page is the answer of the tool: 60 ms of sleep more in each round.
    question = {"cluster": "llama-70b", "job": LARGE_COMM, "rank": CULPRIT}
    with hub.signed_in() as client:
        (most, *_) = client.post("/api/v1/tools/fleet.cluster.explain_rank", json=question).json()["rows"]
    assert most["category"] == "sleep" and f"{most['excess_ms']:.0f}" == "60"


def test_the_slow_rank_is_on_the_canvas_and_its_cell_opens_its_round(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    others = {colour for rank in (0, 256, 1000) for colour in row_colours(page, rank, N_RANKS)}
    own = set(row_colours(page, CULPRIT, N_RANKS))
    assert own - others, "the culprit's row has a colour of its own"
    box = page.locator("canvas.map").bounding_box()
    x = box["x"] + box["width"] * (1 - 15 / 600)
    page.mouse.move(x, box["y"] + box["height"] * (CULPRIT + 0.5) / N_RANKS)
    tip = page.locator(".tip").inner_text()
    assert f"rank {CULPRIT}" in tip and "late 6" in tip
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("section[aria-label=Round]")
    label = page.locator("section[aria-label=Round] svg").get_attribute("aria-label")
    assert f"the last is rank {CULPRIT}, " in label
    late_ms = float(label.split(f"rank {CULPRIT}, ")[1].split(" ms")[0])
    assert late_ms == pytest.approx(LATE_MS, abs=0.3)
    # The link of the view, in a second tab.
    other = page.context.new_page()
    problems.watch(other)
    other.goto(page.url)
    other.wait_for_selector("section[aria-label=Round]")
    assert other.locator("section[aria-label=Round] svg").get_attribute("aria-label") == label


def test_no_pixel_of_the_slow_rank_is_lost_at_10240_ranks(browser, hub: Served, problems):
    """The drawing alone, in the browser: 10,240 rows on 340 pixels, one slow rank."""
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    ranks, culprit, columns = 10_240, 7_003, 60
    late = np.zeros((ranks, columns), np.uint8)
    late[culprit] = 148
    head = {"ranks": ranks, "from_ms": 0, "bucket_ms": 1000, "n": columns, "seq": [1] * columns}
    from stallscope.page.cells import framed

    frame = framed({**head, "comm": [0] * columns, "comms": [COMM]}, late, np.zeros_like(late))
    page.route("**/api/v1/page/matrix*", lambda route: route.fulfill(body=frame))
    page.goto(page.url + f"&from={int(time.time() - 300) * 1000}&to={int(time.time()) * 1000}")
    page.wait_for_selector("canvas.map[data-painted]")
    until(lambda: "10239" in page.locator(".axis.y").inner_text())
    own, other = set(row_colours(page, culprit, ranks)), set(row_colours(page, 3_000, ranks))
    assert len(other) == 1 and own - other


def test_the_keyboard_alone_reaches_the_round(hub: Served, browser, problems):
    page = context(browser).new_page()
    problems.watch(page)
    page.goto(hub.url)
    page.wait_for_selector("#token")
    page.keyboard.insert_text(hub.token())
    page.keyboard.press("Enter")
    page.wait_for_selector("tr.row")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('a[href*=llama-70b]')"):
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("canvas.map[data-painted]")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "map":
            break
    page.keyboard.press("ArrowLeft")
    assert f"rank {CULPRIT}" in page.locator(".tip").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector("section[aria-label=Round]")
    assert f"rank={CULPRIT}" in page.url and "seq=" in page.url


def test_pause_stops_the_map_and_resume_continues_it(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    axis = page.locator(".axis.x")
    page.click("text=Pause")
    page.wait_for_timeout(300)
    before = axis.inner_text()
    page.wait_for_timeout(2500)
    assert axis.inner_text() == before and page.locator("text=paused").count() == 1
    page.click("text=Resume")
    until(lambda: axis.inner_text() != before)


def test_eight_tabs_share_one_stream(hub: Served, browser, problems):
    opened = context(browser)
    first = signed_in(opened, hub, problems)
    for _ in range(7):
        page = opened.new_page()
        problems.watch(page)
        page.goto(hub.url)
        page.wait_for_selector("tr.row")
    assert hub.page.context.feeds.of("a").n_streams <= 2  # this browser's, and a stream that is about to end
    first.close()
    page.wait_for_timeout(1500)
    appended(hub.store, verdicts=verdict_row(verdict_id="new", cluster_id="eu", comm_hash=EU_COMM, pids="[]"))
    page.wait_for_selector("text=2 of 2 jobs are slowed down or stopped")
    closed = {"verdict_id": "new", "cluster_id": "eu", "comm_hash": EU_COMM, "pids": "[]", "state": "closed"}
    appended(hub.store, verdicts=verdict_row(**closed))
    page.wait_for_selector("text=1 of 2 jobs is slowed down or stopped")


@pytest.mark.skipif(not has_axe(), reason="browser: no axe-core; make setup installs it")
@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")], ids=["light", "dark", "phone"]
)
def test_every_view_passes_axe_and_fits_its_width(hub: Served, browser, problems, width: int, scheme: str):
    opened = context(browser, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = opened.new_page()
    problems.watch(page)
    page.goto(hub.url)
    page.wait_for_selector("#token")
    result = {"sign in": violations(page)}
    page.fill("#token", hub.token())
    page.click("text=Sign in")
    page.wait_for_selector("tr.row")
    result["jobs"] = violations(page)
    open_job(page, "llama-70b")
    page.wait_for_selector("text=Time ledger of a round")
    page.locator("canvas.map").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector("section[aria-label=Timeline]")
    result["job"] = violations(page)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    if (width, scheme) == (1280, "light"):
        result |= violations_of_tools(hub, page)
    assert {name: each for name, each in result.items() if each} == {}


def violations_of_tools(hub: Served, page: Any) -> dict[str, list[str]]:
    """axe-core's violations in the views SQL and Compare."""
    result = {}
    page.goto(f"{hub.url}/ui?view=sql&sql=SELECT 1 AS one")
    page.wait_for_selector("td:has-text('1')")
    page.click("summary:text-is('verdicts')")
    page.wait_for_selector("code:has-text('verdict_id')")
    result["sql"] = violations(page)
    page.goto(f"{hub.url}/ui?view=compare")
    page.wait_for_selector("section[aria-label=Difference]")
    result["compare"] = violations(page)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    return result


def test_a_snapshot_opens_without_a_connection(hub: Served, browser, problems, tmp_path: Path):
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    page.wait_for_selector("text=Time ledger of a round")
    with page.expect_download() as download:
        page.click("text=Save snapshot")
    file = tmp_path / "snapshot.html"
    download.value.save_as(file)
    assert file.stat().st_size < 400_000
    offline = context(browser, offline=True).new_page()
    requests: list[str] = []
    offline.on("request", lambda request: requests.append(request.url))
    problems.watch(offline)
    offline.goto(file.as_uri())
    offline.wait_for_selector("canvas.map[data-painted]")
    assert f"Rank {CULPRIT} slows down the job" in offline.locator("section[aria-label=Verdict]").inner_text()
    assert set(row_colours(offline, CULPRIT, N_RANKS)) - set(row_colours(offline, 0, N_RANKS))
    assert requests == [file.as_uri()]
    assert not has_axe() or violations(offline) == []


def test_a_revoked_token_ends_the_open_page(hub: Served, browser, problems):
    token = hub.token()
    page = signed_in(context(browser), hub, problems, token)
    page.wait_for_selector("tr.row")
    hub.tokens.revoke(token.split("_")[1])
    page.wait_for_selector("#token")
    assert page.locator("tr.row").count() == 0


def test_a_share_link_shows_its_job_and_no_list(hub: Served, browser, problems):
    with hub.signed_in() as client:
        key = next(
            row["job"]
            for row in client.get("/api/v1/page/jobs").json()["rows"]
            if row["cluster"] == "llama-70b"
        )
        path = client.post("/api/v1/page/share", json={"job": key}).json()["path"]
    page = context(browser).new_page()
    problems.watch(page)
    page.goto(hub.url + path)
    page.wait_for_selector("canvas.map[data-painted]")
    page.wait_for_selector(f"text=Rank {CULPRIT} slows down the job")
    assert page.locator("header >> text=SQL").count() == 0 and page.locator("text=Share").count() == 0


def test_names_from_jobs_are_text_and_never_run(hub: Served, browser, problems):
    rows = arrivals(4, 30, begin_s=recent_s(), cluster=IMAGE, comm=f"{11:016x}", first_pid=700, node=IMAGE)
    verdict = verdict_row(
        cluster_id=IMAGE, comm_hash=f"{11:016x}", verdict_id=IMAGE, summary=f"Rank 2 of {IMAGE}", pids="[]"
    )
    appended(hub.store, tenant="x", collectives=rows)
    appended(hub.store, tenant="x", verdicts=verdict)
    assert hub.page.memory.wait_until_current()
    page = signed_in(context(browser), hub, problems, hub.token(tenant="x"))
    page.wait_for_selector(f"tr.row a:text-is('{IMAGE}')")
    page.click("tr.row a")
    page.wait_for_selector("canvas.map[data-painted]")
    assert f"Rank 2 of {IMAGE}" in page.locator("section[aria-label=Verdict]").inner_text()
    page.goto(f"{hub.url}/ui?view=sql&sql=SELECT node_id, cluster_id FROM collectives LIMIT 1")
    page.wait_for_selector(f"td:text-is('{IMAGE}')")
    page.goto(f"{hub.url}/ui?job={IMAGE}")
    page.wait_for_selector("h1")
    assert page.locator("img").count() == 0


def test_sql_runs_lists_and_saves_its_rows(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems)
    page.click("header >> text=SQL")
    page.fill(
        "#statement",
        "SELECT rank, min(seq) AS n, '=1+1' AS formula FROM collectives WHERE rank < 3 GROUP BY ALL ORDER BY 1",
    )
    answer, refusal = page.locator("text=3 rows in"), page.locator("header [role=alert]")
    for _ in range(3):  # a busy machine may not start the process of the statement in time
        page.keyboard.press("Control+Enter")
        answer.or_(refusal).first.wait_for()
        if answer.count():
            break
    with page.expect_download() as download:
        page.click("text=Save CSV")
    rows = list(csv.reader(io.StringIO(download.value.path().read_text())))
    with hub.signed_in() as client:
        sql = "SELECT rank, min(seq) AS n FROM collectives WHERE rank < 3 GROUP BY ALL ORDER BY 1"
        wanted = client.post("/api/v1/sql", json={"sql": sql}).json()["rows"]
    assert rows[0] == ["rank", "n", "formula"]
    assert [[int(rank), int(n)] for rank, n, _ in rows[1:]] == wanted and rows[1][2] == "'=1+1"
    with page.expect_download() as download:
        page.click("text=Save Parquet")
    import pyarrow.parquet as pq

    assert pq.read_table(download.value.path())["n"].to_pylist() == [n for _, n in wanted]
    page.fill("#statement", "SELECT nothing FROM nowhere")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("header [role=alert]")


def test_an_alert_is_acknowledged_and_silenced_on_the_card_of_its_incident(hub: Served, browser, problems):
    hub.alerts.note(
        [
            incident(
                "large",
                tenant="a",
                cluster="llama-70b",
                nodes=["node-0"],
                begin_s=time.time() - SENT_EPOCH_S - 60,
            )
        ]
    )
    hub.alerts.evaluate(config(), time.time_ns())
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    page.click("text=Acknowledge")
    page.wait_for_selector("text=acknowledged by token")
    (alert,) = hub.alerts.listed("a")
    assert alert["acknowledged_by"].startswith("token ")
    page.click("text=Undo")
    page.wait_for_selector("text=Acknowledge")
    page.click("text=Silence for 2 hours")
    page.wait_for_selector("text=Silenced until")
    (silence,) = hub.alerts.silences(time.time_ns(), "a")
    assert silence.match["cluster"] == ["llama-70b"] and silence.match["kind"] == ["straggler"]
    page.click("text=End the silence")
    page.wait_for_selector("text=Silence for 2 hours")
    assert hub.alerts.silences(time.time_ns(), "a") == []


def test_stacks_are_a_flame_graph_and_the_window_opens_in_perfetto(hub: Served, browser, problems):
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    process = {"node_id": "gpu-a", "cluster_id": "llama-70b", "pid": 1000 + CULPRIT}
    frames = json.dumps(["nanosleep (libc.so.6)", "/app/train.py:41 load_batch", "/app/train.py:7 <module>"])
    intervals = [
        process
        | {"ts_ns": time.time_ns() - number * S // 10, "tid": 1, "duration_ns": 60 * MS, "category": "sleep"}
        for number in range(-600, 400)  # in any window that the page opens
    ]
    appended(hub.store, stacks=pa.Table.from_pylist([process | {"ts_ns": 0, "stack": 5, "frames": frames}]))
    appended(hub.store, offcpu=pa.Table.from_pylist([row | {"stack": 5} for row in intervals]))
    page = signed_in(context(browser), hub, problems)
    open_job(page, "llama-70b")
    flame = page.locator("section[aria-label=Code] svg")
    flame.wait_for()
    assert "Longest: nanosleep (libc.so.6)" in flame.get_attribute("aria-label")
    assert "train.py:41 load_batch" in flame.inner_html()
    for span in (500, 250, 125):
        page.click("text=Shorter")
        page.wait_for_selector(f"section[aria-label=Timeline] >> text={span} ms")
    with page.expect_download() as download:
        page.click("text=Save this window for Perfetto")
    trace = pb.Trace()
    trace.ParseFromString(download.value.path().read_bytes())
    names = {entry.name for packet in trace.packet for entry in packet.interned_data.event_names}
    assert "sleep" in names, names  # the interval of the culprit that the timeline also shows


def test_an_inconclusive_answer_shows_its_reasons_and_the_data_that_would_decide(
    hub: Served, browser, problems
):
    rows = arrivals(4, 6, begin_s=recent_s(), cluster="young", comm=f"{12:016x}", first_pid=800)
    reasons = [("only 2 steps examined", "Trace at least 20 steps.")]
    appended(hub.store, tenant="y", collectives=rows)
    appended(hub.store, tenant="y", jobs=job_row(rows, answer="inconclusive", reasons=reasons))
    page = signed_in(context(browser), hub, problems, hub.token(tenant="y"))
    page.wait_for_selector("text=no answer yet for 1 job")
    assert "only 2 steps examined" in page.locator("tr.row").inner_text()
    page.click("tr.row a")
    card = page.locator("section[aria-label=Verdict]")
    card.locator("text=how to get an answer").wait_for()
    assert "only 2 steps examined" in card.inner_text() and "Trace at least 20 steps." in card.inner_text()


def test_a_new_hub_shows_how_to_connect_the_first_agent(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems, hub.token(tenant="empty"))
    page.wait_for_selector("text=No job has sent data yet")
    assert "stallscope trace --hub 127.0.0.1:14317 --token-file" in page.locator("pre").inner_text()


def test_a_slow_and_a_failing_hub_keep_the_page_usable(hub: Served, browser, problems):
    page = signed_in(context(browser), hub, problems)
    full = {"error": {"kind": "storage_failed", "message": "the hub cannot read or store its data now"}}
    page.route("**/api/v1/page/evidence*", lambda route: route.fulfill(status=507, body=json.dumps(full)))
    page.route("**/api/v1/page/matrix*", lambda route: (time.sleep(1.0), route.continue_()))
    page.click("tr.row a:has-text('llama-70b')")
    page.wait_for_selector("text=Loading the heat map")
    page.wait_for_selector("text=cannot read or store its data now")
    assert "slows down" in page.locator("section[aria-label=Verdict]").inner_text()
    page.wait_for_selector("canvas.map[data-painted]")
    page.unroute("**/api/v1/page/evidence*")


def test_the_page_continues_after_a_restart_of_the_hub(browser, tmp_path: Path):
    begin_s = recent_s()
    with served(tmp_path) as running:
        appended(running.store, collectives=arrivals(4, 30, begin_s=begin_s, late_ms={(2, 9): 80.0}))
        assert running.page.memory.wait_until_current()
        port = int(running.url.rpartition(":")[2])
        problems = Problems(running.url)
        page = signed_in(context(browser), running, problems)
        page.wait_for_selector("tr.row")
    page.wait_for_selector("text=no connection to the hub")
    with served(tmp_path, port=port) as running:
        appended(running.store, verdicts=verdict_row())
        page.wait_for_selector("text=1 of 1 job is slowed down or stopped")
        page.wait_for_selector("header >> text=live")
        open_job(page, "c1")
        assert page.locator("#token").count() == 0
    assert problems.found == []
