"""A browser for tests: pages that record console errors and external requests, and axe-core's findings."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from .servers import Served

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
_AXE = Path(__file__).resolve().parents[2] / ".venv" / "node" / "node_modules" / "axe-core" / "axe.min.js"
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
TIMEOUT_MS = 45_000


@dataclass
class Problems:
    """Events that no page may cause: console errors, exceptions, dialogs, requests to another host."""

    own: str
    found: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", lambda message: self._note("console", message.text, message.type == "error"))
        page.on("pageerror", lambda error: self._note("exception", str(error), True))
        page.on("dialog", lambda dialog: self._note("dialog", dialog.message, True))
        page.on("request", lambda request: self._note("request", request.url, self._is_external(request.url)))

    def _is_external(self, url: str) -> bool:
        return not url.startswith((self.own, "blob:", "file:"))

    def _note(self, kind: str, text: str, is_problem: bool) -> None:
        # A browser reports each answer of 401 or 503 as a console error: these tests cause them.
        if is_problem and "Failed to load resource" not in text:
            self.found.append(f"{kind}: {text[:300]}")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def context(browser: Browser, **options: Any) -> BrowserContext:
    opened = browser.new_context(
        **{
            "viewport": {"width": 1280, "height": 900},
            "color_scheme": "light",
            "timezone_id": "Europe/Berlin",
        }
        | options
    )
    opened.set_default_timeout(TIMEOUT_MS)
    return opened


def signed_in(opened: BrowserContext, hub: Served, problems: Problems, token: str | None = None) -> Page:
    """A page of the hub after sign-in, with its list of jobs."""
    page = opened.new_page()
    problems.watch(page)
    page.goto(hub.url)
    page.fill("#token", token or hub.token())
    page.click("text=Sign in")
    page.wait_for_selector("text=live")
    return page


def open_job(page: Page, name: str) -> None:
    """Open a job from the list, and wait for its map."""
    page.click(f"tr.row a:has-text('{name}')")
    page.wait_for_selector("canvas.map[data-painted]")


def violations(page: Page) -> list[str]:
    """axe-core's violations; its script runs through the debugger, which the page's policy does not bind."""
    page.evaluate(_AXE.read_text())
    evaluate = page.evaluate(
        "rules => globalThis.axe.run(document, {runOnly: rules}).then(result => result.violations)", _RULES
    )
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in evaluate]


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. A condition in the page would need `eval`, which the page's policy forbids."""
    end_s = time.monotonic() + TIMEOUT_MS / 1000
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true"
        time.sleep(0.1)


def has_axe() -> bool:
    return _AXE.is_file()


def row_colours(page: Page, rank: int, n_ranks: int) -> list[tuple[int, ...]]:
    """The distinct colours on the canvas, in the rows of pixels that show a rank."""
    return [
        tuple(colour)
        for colour in page.evaluate(
            """([rank, n]) => {
                const canvas = document.querySelector('canvas.map'), {width, height} = canvas
                const first = Math.floor(rank * height / n)
                const last = Math.max(first + 1, Math.ceil((rank + 1) * height / n))
                const data = canvas.getContext('2d').getImageData(0, first, width, last - first).data
                const seen = new Set()
                for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i+1]},${data[i+2]}`)
                return [...seen].map(text => text.split(',').map(Number))
            }""",
            [rank, n_ranks],
        )
    ]
