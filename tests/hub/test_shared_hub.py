"""Hubs that share their data, as a user starts them: tokens, senders, answers and states are shared."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from tests import shared_servers

from stallscope import hub
from stallscope.errors import BadInput
from stallscope.exporters import hub_arrow
from stallscope.settings import Settings
from stallscope.store.shared.slots import slot_of
from stallscope.stress import load

CLUSTERS = [f"c{n}" for n in range(8)]


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """The settings of hubs that share a new database and a new bucket."""
    if reason := shared_servers.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in shared_servers.environment().items():
            patch.setenv(name, value)
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        folder.chmod(0o755)  # for the user of PostgreSQL
        postgres = stack.enter_context(shared_servers.postgres_server(folder / "postgres"))
        s3 = stack.enter_context(shared_servers.s3_server(folder / "s3"))
        yield Settings(
            hub_shared=postgres.new_database(),
            hub_bucket=s3.bucket(),
            hub_peer="127.0.0.1:0",
            hub_peer_host="127.0.0.1",
            hub_lease_s=3.0,
        )


def options(folder: Path, settings: Settings) -> hub.Options:
    return hub.Options(
        db=folder, otlp_grpc="127.0.0.1:0", otlp_http="127.0.0.1:0", api="127.0.0.1:0", settings=settings
    )


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "the condition does not become true"
        time.sleep(0.1)


def body(cluster: str, batch_id: str) -> tuple[bytes, int]:
    job = load.Job(name=cluster, ranks=4, first_rank=0, world=4, interval_ns=10**8, straggler=None, late_ns=0)
    first = load.rounds_until(job, time.time_ns()) - 10
    tables = {"collectives": load.collectives(job, first, 10, origin_round=first)}
    request = hub_arrow.request(tables, batch_id=batch_id, node="n0", cluster=cluster, about={})
    return request, 40


def sent(port: int, token: str, message: bytes) -> bool:
    """Whether the batch was a duplicate; repeated as an agent would."""
    end_s = time.monotonic() + 60
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(hub_arrow.METHOD)
        while True:
            try:
                answer = json.loads(
                    call(message, timeout=20, metadata=(("authorization", f"Bearer {token}"),))
                )
                return bool(answer["is_duplicate"])
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < end_s, error
                time.sleep(0.2)


def test_two_hubs_are_one_service(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run):
    monkeypatch.setenv("STALLSCOPE_HUB_SHARED", settings.hub_shared)
    code, token, _ = run(
        "hub", "token", "create", "--scope", "ingest,read,sql,admin", "--db", str(tmp_path / "elsewhere")
    )
    token = token.splitlines()[-1]
    assert code == 0
    headers = {"authorization": f"Bearer {token}"}
    with hub.started(options(tmp_path / "a", settings)) as one:
        with hub.started(options(tmp_path / "b", settings)) as two:
            ports = (one, two)

            def state(of: hub.Ports) -> dict:
                answer = httpx.get(f"http://127.0.0.1:{of.api}/api/v1/shared", headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()

            until(lambda: sorted(h["n_slots"] for h in state(one)["hubs"]) == [32, 32])
            for number, cluster in enumerate(CLUSTERS):
                message, _ = body(cluster, f"b-{cluster}")
                assert [sent(p.otlp_grpc, token, message) for p in (ports[number % 2], *ports)] == [
                    False,
                    True,
                    True,
                ]
            query = {
                "sql": "SELECT cluster_id, count(*) FROM collectives GROUP BY cluster_id ORDER BY cluster_id"
            }
            wanted = [[cluster, 40] for cluster in CLUSTERS]
            for port in ports:
                url = f"http://127.0.0.1:{port.api}/api/v1/sql"
                answers: list[list] = []

                def is_answered(url: str = url, answers: list[list] = answers) -> bool:
                    """A process for the query starts with it, and may need longer than the query may take."""
                    answer = httpx.post(url, json=query, headers=headers, timeout=60)
                    assert answer.status_code in (200, 503, 504, 507), answer.text
                    answers += [answer.json()["rows"]] if answer.status_code == 200 else []
                    return bool(answers)

                until(is_answered, 200)
                assert answers == [wanted]
            versions = httpx.get(f"http://127.0.0.1:{one.api}/api/versions").json()
            assert versions["capabilities"]["shared"] is True
            metrics = httpx.get(f"http://127.0.0.1:{one.api}/metrics", headers=headers).text
            assert (
                "stallscope_hub_slot_rows_stored{slot=" in metrics and "stallscope_hub_n_hubs 2.0" in metrics
            )
            slots = {slot["slot"]: slot for slot in state(two)["slots"]}
            assert all(slots[slot_of("default", c)]["unsealed_rows"] >= 40 for c in CLUSTERS)
            code, out, _ = run("hub", "status", "--json")
            assert code == 0 and json.loads(out)["n_slots_without_owner"] == 0
        until(lambda: [h["n_slots"] for h in state(one)["hubs"]] == [64])
        assert all(sent(one.otlp_grpc, token, body(c, f"b-{c}")[0]) for c in CLUSTERS)
    monkeypatch.setenv("STALLSCOPE_HUB_BUCKET", settings.hub_bucket)
    code, out, _ = run("hub", "check")
    assert code == 0 and "320 readable rows, 0 problems" in out
    code, out, err = run("hub", "status")
    assert code == 4 and "64 slots have no owner" in err


def test_settings_that_do_not_fit_are_refused(tmp_path: Path):
    for given, words in (
        ({"hub_bucket": "s3://b"}, "--bucket needs --shared"),
        ({"hub_shared": "postgresql://h/d"}, "--shared needs --bucket"),
        ({"hub_shared": "postgresql://u:sesame@h/d", "hub_bucket": "s3://b"}, "contains a password"),
    ):
        with (
            pytest.raises(BadInput, match=words) as raised,
            hub.started(options(tmp_path / "hub", Settings(**given))),
        ):
            pass
        assert "sesame" not in str(raised.value)
