"""The HTML files of `report cost` and `report job` in Chromium: accessible, complete at every width, no request."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.diagnose.builders import MS, dp_trace, every
from tests.page.browsing import Problems, chromium, context, has_axe, violations

from stallscope.commands.cost_page import as_html
from stallscope.commands.job_page import as_html as job_html
from stallscope.commands.job_report import of_report
from stallscope.diagnose import as_json, diagnose

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("chromium") or shutil.which("google-chrome")), reason="browser: no Chromium"
    ),
    pytest.mark.skipif(not has_axe(), reason="browser: no axe-core; make setup installs it"),
]


def cost_page() -> str:
    def row(cluster: str, gpu_seconds: float, **more: Any) -> dict[str, Any]:
        row = {"cluster": cluster, "n_incidents": 3, "gpu_seconds": gpu_seconds, "at_most_gpu_seconds": None}
        return row | {"usd": 12.5, "at_most_usd": None, "usd_per_hour": 0.5} | more

    rows = [
        row("training-east", 9000.0, at_most_gpu_seconds=12000.0),
        row("x" * 120, 20.0),
        row("eu", 1.0, usd=None),
    ]
    answers = {
        by: {"summary": "9 incidents cost $25.00 (9,021 GPU seconds).", "rows": rows} for by in ("cluster",)
    }
    return as_html(answers, "Cost of GPU stalls, 2026-11-29 01:00 to 2026-11-30 01:00 UTC")


def job_page() -> str:
    return job_html(of_report(as_json(diagnose(dp_trace(every(2, 7, 50 * MS)))), "/data/job.db"))


def test_pages_are_accessible_fit_their_width_and_request_nothing(tmp_path: Path):
    problems = Problems(own="file:")
    with chromium() as browser:
        for name, text in (("cost", cost_page()), ("job", job_page())):
            path = tmp_path / f"{name}.html"
            path.write_text(text)
            for width, scheme in ((1280, "light"), (390, "dark")):
                opened = context(
                    browser, viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
                )
                page = opened.new_page()
                problems.watch(page)
                page.goto(path.as_uri())
                if folder := os.environ.get("STALLSCOPE_SCREENSHOTS"):
                    page.screenshot(path=f"{folder}/{name}-{width}.png", full_page=True)
                assert violations(page) == [], (name, width)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
                opened.close()
    assert problems.found == []
