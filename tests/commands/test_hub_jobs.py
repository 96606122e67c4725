"""`stallscope gate --job` and `compare --hub`: jobs of a hub that is served."""

import json
from typing import Any

import pytest
from tests.serve.answering import answering
from tests.serve.tools import cluster

from stallscope.store.hub.store import Batch

SECONDS, N_RANKS, USD_PER_GPU_HOUR = 100, 8, 3.0
GAP = {"reason": "2 of 10 ranks are not in this trace", "action": "Trace the other ranks."}
PRICED, UNPRICED = "NVIDIA H100 80GB HBM3", "Abacus 1"


def job_row(job: str, answer: str, **changes: Any) -> dict[str, Any]:
    """A job of 8 ranks over 100 s."""
    end_ns = cluster.T0_NS + SECONDS * 10**9
    row = {
        "cluster_id": "alpha",
        "job": job,
        "begin_ns": cluster.T0_NS,
        "last_ns": end_ns,
        "ended_ns": end_ns,
    }
    row |= {"n_ranks": N_RANKS, "members": '[["alpha-node-0", 1003, 3]]', "answer": answer, "reasons": "[]"}
    return row | {"evidence": json.dumps({"n_steps": 40, "step_ms": 200.0})} | changes


def verdict_row(job: str, **changes: Any) -> dict[str, Any]:
    """A straggler, 40 ms late, that cost 10 % of the GPU time of its job."""
    row = cluster.verdict("alpha").to_pylist()[0]
    lost = {"gpu_seconds": 0.1 * N_RANKS * SECONDS, "until_ns": cluster.T0_NS + SECONDS * 10**9}
    return row | {"job": job, "verdict_id": f"of {job}"} | lost | changes


JOBS = [
    job_row("healthy", "healthy"),
    job_row("slow", "found"),
    job_row("longer", "healthy", evidence=json.dumps({"n_steps": 40, "step_ms": 300.0})),
    job_row("incomplete", "inconclusive", reasons=json.dumps([GAP])),
    job_row("unmeasured", "found"),
    job_row("hung", "found"),
    job_row("earlier", "healthy", evidence=json.dumps({"n_steps": 40})),
    *(job_row(f"run {number}", "healthy", owner_job="1729") for number in range(2)),
]
VERDICTS = [
    verdict_row("slow"),
    verdict_row("unmeasured", gpu_seconds=None, is_lower_bound=None),
    verdict_row("hung", kind="hang", summary="A hang.", gpu_seconds=None),
]


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory):
    """Words for the commands by GPU model: address and token of a hub whose machines have these GPUs."""
    words = {}
    folder = tmp_path_factory.mktemp("hubs")
    with cluster.hub_in(folder / "priced") as priced, cluster.hub_in(folder / "unpriced") as unpriced:
        for gpu, made in ((PRICED, priced), (UNPRICED, unpriced)):
            rows = {"jobs": cluster.table("jobs", JOBS), "verdicts": cluster.table("verdicts", VERDICTS)}
            rows["nodes"] = cluster.machines("alpha", gpu=gpu)
            for name, table in rows.items():
                made.store.append(Batch("", "a", {name: table})).result(30)
        with (
            answering(priced, folder / "served") as first,
            answering(unpriced, folder / "served unpriced") as second,
        ):
            for gpu, result in ((PRICED, first), (UNPRICED, second)):
                token = folder / f"{gpu}.token"
                token.write_text(result.token(("read",), "a"))
                words[gpu] = ["--hub", result.url, "--token-file", token]
            yield words


@pytest.fixture
def hub(hubs: dict[str, list[Any]]) -> list[Any]:
    return hubs[PRICED]


@pytest.mark.parametrize(
    ("job", "limits", "code", "text"),
    [
        ("healthy", ["--max-late-ms", 5, "--max-lost", 1, "--max-usd-per-hour", 0], 0, "within the limits"),
        ("slow", ["--max-late-ms", 41, "--max-lost", 11], 0, "within the limits"),
        ("slow", ["--max-late-ms", 39], 23, "lateness 40.0 ms exceeds 39.0 ms"),
        ("slow", ["--max-lost", 9], 23, "lost GPU time 10.0 % exceeds 9.0 %"),
        ("incomplete", ["--max-late-ms", 5], 21, f"inconclusive: {GAP['reason']}"),
        ("unmeasured", ["--max-lost", 50], 21, "inconclusive: the lost GPU time of the fault is not known"),
        ("unmeasured", ["--max-usd-per-hour", 50], 21, "inconclusive: the cost of the fault is not known"),
        ("hung", ["--max-late-ms", 1000], 23, "the job makes no progress: A hang."),
    ],
)
def test_gate_compares_a_job_with_the_limits(run, hub, job, limits, code, text):
    assert run("gate", "--job", job, *hub, *limits)[:2] == (code, f"gate: {text}\n")


def test_gate_uses_the_prices_of_the_hub(run, hub):
    (row,) = json.loads(run("report", "cost", *hub, "--since", "20000d", "--format", "json")[1])["rows"]
    usd_per_hour = row["usd"] / SECONDS * 3600
    assert usd_per_hour > 0
    for limit, code in ((usd_per_hour * 1.01, 0), (usd_per_hour * 0.99, 23)):
        done, out, _ = run("gate", "--job", "slow", *hub, "--max-usd-per-hour", limit, "--json")
        assert done == code
        assert json.loads(out)["usd_per_hour"] == pytest.approx(usd_per_hour, rel=1e-3)


def test_missing_price_is_inconclusive_and_can_be_given(run, hubs):
    words = ["gate", "--job", "slow", *hubs[UNPRICED], "--max-usd-per-hour", 2.5]
    code, out, _ = run(*words)
    assert (code, "no price is known" in out) == (21, True)
    code, out, _ = run(*words, "--usd-per-gpu-hour", USD_PER_GPU_HOUR)
    expected = 0.1 * N_RANKS * USD_PER_GPU_HOUR
    assert expected == pytest.approx(2.4)
    assert code == 0, out
    assert run("gate", "--job", "healthy", *hubs[UNPRICED], "--max-usd-per-hour", 0)[0] == 0


@pytest.mark.parametrize(
    ("before", "after", "code", "text"),
    [
        ("slow", "healthy", 0, "No regression."),
        ("healthy", "slow", 23, "rank 5 (block_io) loses 10.0% of the GPU time; before: 0.0%"),
        ("healthy", "longer", 23, "a step takes 300.0 ms, 50% more than 200.0 ms"),
        ("healthy", "hung", 23, "Regression: A hang."),
        ("healthy", "incomplete", 21, f"Inconclusive: after: {GAP['reason']}."),
        ("earlier", "healthy", 21, "Inconclusive: before: the data has no step times"),
    ],
)
def test_compare_two_jobs(run, hub, before, after, code, text):
    done, out, _ = run("compare", before, after, *hub)
    assert (done, text in out) == (code, True), out


def test_compare_lists_the_changes_of_budget_lateness_and_cost(run, hub):
    out = run("compare", "slow", "healthy", *hub)[1]
    rows = {line[:16].strip(): line[16:].split() for line in out.splitlines()}
    assert rows["lateness"][0] == "40.0"
    assert rows["input"] == ["10%", "0%", "-10.0", "points"]
    assert rows["productive"] == ["90%", "100%", "+10.0", "points"]
    assert rows["cost per hour"][1] == "$0.00"
    data = json.loads(run("compare", "slow", "healthy", *hub, "--json")[1])
    assert data["before"]["usd_per_hour"] > data["after"]["usd_per_hour"] == 0
    assert data["budget_change"] == pytest.approx({"productive": 0.1, "input": -0.1}, abs=1e-3)


@pytest.mark.parametrize(
    ("job", "text"), [("none", "no job 'none'"), ("1729", "name of 2 jobs"), ("", "is empty")]
)
def test_unknown_and_ambiguous_jobs_are_one_line(run, hub, job, text):
    code, out, errors = run("gate", "--job", job, *hub, "--max-lost", 1)
    assert code not in (0, 21, 23)
    assert (out, errors.count("\n"), text in errors) == ("", 1, True), errors


@pytest.mark.parametrize("words", [[], ["job.db", "--job", "slow"]])
def test_gate_needs_a_trace_or_a_job(run, words):
    assert "give a trace, or the job of a hub" in run("gate", *words, "--max-lost", 1)[2]
