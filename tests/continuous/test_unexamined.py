"""A failed or skipped evaluation is stated in answers: no answer calls data healthy that was not examined."""

import asyncio
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.store.hub.rows import appended, collectives

from stallscope import rates
from stallscope.continuous import ContinuousDiagnosis
from stallscope.serve import tools
from stallscope.serve.tokens import Identity
from stallscope.serve.tool_calls import called
from stallscope.serve.tools.tenant_context import Hub
from stallscope.serve.tools.tool_registry import collected
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore
from stallscope.store.hub.unexamined import Unexamined

ME = Identity("a", frozenset({"read"}), "t")


class Broken:
    """A stream whose evaluation raises, as with a defect."""

    n_jobs = 1

    def feed(self, *_: Any, **__: Any) -> list[Any]:
        raise ZeroDivisionError

    def tick(self) -> list[Any]:
        return []

    def jobs(self) -> list[Any]:
        return []

    def confirmed_ns(self) -> dict[str, int]:
        return {}


def summary_of(store: HubStore, tool: str, cluster: str | None = None) -> str:
    hub = Hub(store, rates.load(), SimpleNamespace())  # type: ignore[arg-type]
    arguments = {} if cluster is None else {"cluster": cluster}
    return str(asyncio.run(called(hub, collected(tools), tool, arguments=arguments, identity=ME))["summary"])


def test_after_a_failed_evaluation_verdicts_are_unknown_and_every_summary_has_the_reason(tmp_path: Path):
    with closing(HubStore.open(tmp_path, Limits(maintenance_s=3600))) as store:
        assert "No verdict matches" in summary_of(store, "fleet.cluster.verdicts")
        with closing(ContinuousDiagnosis(store, Broken)):  # type: ignore[arg-type]
            appended(store, collectives=collectives([1, 2, 3]))
            end_s = time.monotonic() + 30
            while not store.unexamined.reason("a", "c1") and time.monotonic() < end_s:
                time.sleep(0.02)
        for tool in ("fleet.cluster.verdicts", "fleet.cluster.summary", "fleet.cluster.get_cost"):
            summary = summary_of(store, tool)
            assert "ZeroDivisionError" in summary and "3 rows were not examined" in summary
        assert summary_of(store, "fleet.cluster.verdicts").startswith("Unknown.")
        assert "No verdict matches" in summary_of(store, "fleet.cluster.verdicts", "another")


def test_unexamined_rows_are_counted_per_tenant_and_expire():
    now_s = 0.0
    unexamined = Unexamined(clock_s=lambda: now_s)
    unexamined.add("a", "c", n_rows=3)
    unexamined.add("a", "c", n_rows=4)
    assert "7 rows" in unexamined.reason("a", None) and unexamined.reason("b", None) == ""
    now_s = 901.0
    assert unexamined.reason("a", None) == ""


def test_the_named_clusters_of_a_tenant_are_bounded_and_the_others_are_counted_together():
    unexamined = Unexamined()
    for number in range(1_000):
        unexamined.add("attacker", f"c{number}", n_rows=2)
    unexamined.add("honest", "mine", n_rows=3)
    assert unexamined.n_rows("attacker", None) == 2_000
    assert unexamined.n_rows("attacker", "c0") == 2
    assert "further clusters" in unexamined.reason("attacker", "c999")
    assert "further clusters" not in unexamined.reason("attacker", "c0")
    assert len(unexamined.known()) < 300 and "'mine'" in unexamined.reason("honest", "mine")
