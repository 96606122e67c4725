"""Hubs that share their data, as a user starts them: tokens, senders, answers and states are shared."""

import json
import time
from dataclasses import replace
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

from ..patience import until

CLUSTERS = [f"c{n}" for n in range(8)]


@pytest.fixture
def settings(postgres_server: shared_servers.PostgresServer, s3_server: shared_servers.S3Server) -> Settings:
    """The settings of hubs that share a new database and a new prefix of the bucket."""
    return Settings(
        hub_shared=postgres_server.new_database(),
        hub_bucket=s3_server.bucket(f"hubs{postgres_server.n_databases}"),
        hub_peer="127.0.0.1:0",
        hub_peer_host="127.0.0.1",
        hub_lease_s=3.0,
    )


def options(folder: Path, settings: Settings) -> hub.Options:
    grpc_address = settings.hub_direct or "127.0.0.1:0"
    return hub.Options(
        db=folder, otlp_grpc=grpc_address, otlp_http="127.0.0.1:0", api="127.0.0.1:0", settings=settings
    )


def directing(settings: Settings) -> Settings:
    """The settings of a hub to which agents are directed."""
    return replace(settings, hub_direct=f"127.0.0.1:{shared_servers.free_port()}")


def body(cluster: str, batch_id: str) -> tuple[bytes, int]:
    job = load.Job(name=cluster, ranks=4, first_rank=0, world=4, interval_ns=10**8, straggler=None, late_ns=0)
    first = load.rounds_until(job, time.time_ns()) - 10
    tables = {"collectives": load.collectives(job, first, 10, origin_round=first)}
    request = hub_arrow.request(tables, batch_id=batch_id, node="n0", cluster=cluster, about={})
    return request, 40


def sent(port: int, token: str, message: bytes) -> bool:
    """Whether the batch was a duplicate."""
    return bool(answer_to(port, token, message)["is_duplicate"])


def answer_to(port: int, token: str, message: bytes) -> dict:
    """The answer to a batch, which is repeated as an agent would."""
    end_s = time.monotonic() + 60
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(hub_arrow.METHOD)
        while True:
            try:
                return json.loads(call(message, timeout=20, metadata=(("authorization", f"Bearer {token}"),)))
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
    with hub.started(options(tmp_path / "a", directing(settings))) as one:
        with hub.started(options(tmp_path / "b", directing(settings))) as two:
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
            addresses = [f"127.0.0.1:{port.otlp_grpc}" for port in ports]

            def are_directed() -> bool:
                """Whether both hubs name the owner of each cluster; both hubs own clusters."""
                messages = [body(cluster, f"b-{cluster}")[0] for cluster in CLUSTERS]
                named = [[answer_to(p.otlp_grpc, token, m).get("owner") for p in ports] for m in messages]
                return all(each in ([None, addresses[0]], [addresses[1], None]) for each in named) and any(
                    each != named[0] for each in named
                )

            until(are_directed)
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

                until(is_answered, seconds=200)
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
