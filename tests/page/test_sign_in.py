"""Sessions of browsers: sign-in, revocation, cross-site requests, tenants, share links, streams, the audit log."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.page.sessions import Sessions, check_origin
from stallscope.serve.tokens import Tokens

from ..store.hub.rows import appended
from .jobs import COMM, arrivals, recent_s, verdict_row
from .servers import SAME_ORIGIN, Served, served

JOB = f"c1:{COMM}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hub")) as running:
        appended(running.store, collectives=arrivals(4, 30, begin_s=recent_s()))
        appended(running.store, verdicts=verdict_row())
        other = arrivals(4, 30, begin_s=recent_s(), cluster="theirs", comm=f"{9:016x}")
        appended(running.store, tenant="b", collectives=other)
        assert running.page.memory.wait_until_current()
        yield running


def test_a_token_begins_a_session_with_a_cookie_that_scripts_cannot_read(hub: Served):
    with hub.client(headers=SAME_ORIGIN) as client:
        assert client.get("/api/v1/page/jobs").status_code == 401
        answer = client.post("/login", json={"token": hub.token()})
        cookie = answer.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"))
        (row,) = client.get("/api/v1/page/jobs").json()["rows"]
        assert row["job"] == JOB
        assert client.post("/api/v1/tools/fleet.cluster.verdicts", json={}).json()["rows"][0]["rank"] == 2


def test_with_tls_the_cookie_is_bound_to_the_host(tmp_path: Path):
    with served(tmp_path, is_tls=True) as running, running.client(headers=SAME_ORIGIN) as client:
        cookie = client.post("/login", json={"token": running.token()}).headers["set-cookie"]
    assert cookie.startswith("__Host-stallscope=") and "; Secure" in cookie


def test_a_wrong_token_and_a_token_without_read_begin_no_session(hub: Served):
    with hub.client(headers=SAME_ORIGIN) as client:
        assert client.post("/login", json={"token": "sst_0123456789ab_" + "x" * 43}).status_code == 401
        assert client.post("/login", json={"token": hub.token("ingest")}).status_code == 403
        assert client.post("/login", json={"token": 7}).status_code == 400
        assert "not a token" in client.post("/login", json={"token": "a password"}).text
        assert not client.cookies


def test_revoking_the_token_ends_its_sessions_and_share_links(hub: Served):
    token = hub.token()
    with hub.client(headers=SAME_ORIGIN) as client, hub.client() as reader:
        client.post("/login", json={"token": token})
        path = client.post("/api/v1/page/share", json={"job": JOB}).json()["path"]
        assert reader.get(path).headers["location"].startswith("/ui?job=")
        assert reader.get("/api/v1/page/job", params={"job": JOB}).status_code == 200
        hub.tokens.revoke(token.split("_")[1])
        assert client.get("/api/v1/page/jobs").status_code == 401
        assert reader.get("/api/v1/page/job", params={"job": JOB}).status_code == 401
        assert "link_expired" in reader.get(path).headers["location"]


def test_signing_out_ends_the_session_at_the_hub(hub: Served):
    with hub.signed_in() as client:
        secret = client.cookies["stallscope"]
        client.post("/logout", json={})
    with hub.client(cookies={"stallscope": secret}) as thief:
        assert thief.get("/api/v1/page/jobs").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({}, 403),
    ],
)
def test_another_site_cannot_act_with_the_cookie(hub: Served, headers: dict[str, str], status: int):
    with hub.signed_in() as client:
        secret = client.cookies["stallscope"]
    with hub.client(cookies={"stallscope": secret}, headers=headers) as client:
        assert client.post("/api/v1/sql", json={"sql": "SELECT 1"}).status_code == status
        assert client.post("/logout", json={}).status_code == status


def test_a_form_of_another_site_cannot_sign_its_visitor_in(hub: Served):
    with hub.client(headers={"Sec-Fetch-Site": "cross-site"}) as client:
        assert client.post("/login", json={"token": hub.token()}).status_code == 403
    text = {
        "method": "POST",
        "headers": [(b"sec-fetch-site", b"same-origin"), (b"content-type", b"text/plain")],
    }
    with pytest.raises(Exception, match="not JSON"):
        check_origin(text)


def test_requests_with_a_bearer_token_need_no_origin(hub: Served):
    headers = {"Authorization": f"Bearer {hub.token()}"}
    with hub.client(headers=headers) as client:
        assert client.post("/api/v1/sql", json={"sql": "SELECT 1"}).status_code == 200


def test_a_tenant_sees_only_its_jobs_on_every_answer(hub: Served):
    with hub.signed_in(tenant="b") as client:
        (row,) = client.get("/api/v1/page/jobs").json()["rows"]
        assert row["cluster"] == "theirs"
        window = {"from": 0, "to": 1000, "n": 1}
        for name, more in (
            ("evidence", {"rank": 2}),
            ("matrix", window),
            ("round", {"comm": COMM, "seq": 1}),
            ("timeline", {"ranks": "0", "from": 0, "to": 1000}),
            ("perfetto", {"from": 0, "to": 1000}),
            ("snapshot", window),
        ):
            assert client.get(f"/api/v1/page/{name}", params={"job": JOB, **more}).status_code == 404, name
        answer = client.get("/api/v1/page/job", params={"job": JOB}).json()
        assert (answer["job"], answer["verdict"], answer["incidents"]) == (None, None, [])


def test_a_share_link_gives_access_to_one_job_only(hub: Served):
    with hub.signed_in() as owner, hub.client(headers=SAME_ORIGIN) as reader:
        path = owner.post("/api/v1/page/share", json={"job": JOB, "expires_s": 3600}).json()["path"]
        reader.get(path)
        now_ms = int(time.time()) * 1000
        job = {"job": JOB}
        assert reader.get("/api/v1/page/job", params=job).json()["verdict"]["rank"] == 2
        assert (
            reader.get(
                "/api/v1/page/matrix", params={**job, "from": now_ms - 9000, "to": now_ms, "n": 9}
            ).status_code
            == 200
        )
        assert reader.get("/api/v1/page/evidence", params={**job, "rank": 2}).status_code == 200
        assert reader.get("/api/v1/page/about").json()["user"]["job"] == JOB
        for method, target, more in (
            ("GET", "/api/v1/page/jobs", {}),
            ("GET", "/api/v1/page/job", {"params": {"job": "other:aa"}}),
            ("POST", "/api/v1/sql", {"json": {"sql": "SELECT 1"}}),
            ("POST", "/api/v1/tools/fleet.cluster.verdicts", {"json": {}}),
            ("POST", "/api/v1/page/share", {"json": {"job": JOB}}),
            ("POST", "/api/v1/page/parquet", {"json": {"columns": [], "rows": []}}),
            ("GET", "/metrics", {}),
        ):
            assert reader.request(method, target, **more).status_code == 403, target


def test_a_share_link_leaves_a_signed_in_reader_signed_in(hub: Served):
    with hub.signed_in() as owner, hub.signed_in() as reader:
        path = owner.post("/api/v1/page/share", json={"job": JOB}).json()["path"]
        before = reader.cookies["stallscope"]
        reader.get(path)
        assert reader.cookies["stallscope"] == before and reader.get("/api/v1/page/jobs").status_code == 200


def test_sessions_and_share_links_expire_and_survive_a_restart(tmp_path: Path):
    tokens = Tokens(tmp_path / "tokens.json")
    identity = tokens.identity(f"Bearer {tokens.create(['read'], 'a')}")
    now_s = 1000.0
    sessions = Sessions(tmp_path / "sessions.json", tokens, now_s=lambda: now_s)
    secret = sessions.begin(identity)
    link = sessions.share(identity, JOB, expires_in_s=600)
    again = Sessions(tmp_path / "sessions.json", tokens, now_s=lambda: now_s)
    assert again.identity(secret) == identity and again.identity(link).job == JOB
    assert secret not in (tmp_path / "sessions.json").read_text()
    now_s = 1601.0
    assert again.identity(link) is None and again.identity(secret) == identity
    now_s = 1000.0 + 12 * 3600 + 1
    assert again.identity(secret) is None
    (tmp_path / "sessions.json").write_text("{damaged")
    assert Sessions(tmp_path / "sessions.json", tokens).identity(secret) is None


@pytest.mark.parametrize("expires_s", [5, 10**9, "1h", True])
def test_a_share_link_needs_a_sensible_duration(hub: Served, expires_s: object):
    with hub.signed_in() as client:
        answer = client.post("/api/v1/page/share", json={"job": JOB, "expires_s": expires_s})
        assert answer.status_code == 400 and "expires_s" in answer.json()["error"]["message"]


def test_an_administrator_can_end_all_sessions_of_the_tenant(hub: Served):
    with hub.signed_in(tenant="c") as client, hub.signed_in("read", "admin", tenant="c") as admin:
        assert client.post("/api/v1/page/sign_out_everywhere", json={}).status_code == 403
        assert admin.post("/api/v1/page/sign_out_everywhere", json={}).json()["n_ended"] == 2
        assert client.get("/api/v1/page/jobs").status_code == 401


def test_every_answer_has_the_strict_policy_and_is_not_stored(hub: Served):
    with hub.signed_in() as client:
        for target in ("/ui", "/api/v1/page/jobs", f"/api/v1/page/job?job={JOB}"):
            headers = client.get(target).headers
            if target != "/ui" or client.get(target).status_code == 200:
                assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
                assert "unsafe" not in headers["content-security-policy"]
                assert headers["x-content-type-options"] == "nosniff"
        assert client.get("/api/v1/page/jobs").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("matrix", {"job": JOB, "from": "x", "to": 1, "n": 1}, "not a whole number"),
        ("matrix", {"job": JOB, "from": 5, "to": 1, "n": 1}, "to > from"),
        ("matrix", {"job": JOB, "from": 1, "to": 2, "n": 10**9}, "0 to 1,200"),
        ("round", {"job": JOB, "comm": COMM}, "seq is missing"),
        ("evidence", {"job": JOB, "rank": -1}, "not a whole number"),
        ("timeline", {"job": JOB, "ranks": "1;2", "from": 1, "to": 2}, "ranks="),
        ("timeline", {"job": JOB, "ranks": "1", "from": 1, "to": 10**9}, "at most 60 s"),
        ("job", {}, "job is missing"),
    ],
)
def test_a_wrong_parameter_is_refused_in_one_line(hub: Served, name: str, params: dict, message: str):
    with hub.signed_in() as client:
        answer = client.get(f"/api/v1/page/{name}", params=params)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def events(lines: Iterator[str], until: str, max_s: float = 30.0) -> list[tuple[str, str, str]]:
    """(id, event, data) of a stream up to the first event of a kind."""
    out, fields, end_s = [], {}, time.monotonic() + max_s
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            out.append((fields.get("id", ""), fields["event"], fields.get("data", "")))
            fields = {}
            if out[-1][1] == until or time.monotonic() > end_s:
                return out
    return out


def test_the_stream_sends_jobs_resumes_after_the_last_event_and_ends_with_the_session(hub: Served):
    token = hub.token()
    with hub.client(headers=SAME_ORIGIN) as client:
        client.post("/login", json={"token": token})
        with client.stream("GET", "/api/v1/page/stream") as response:
            first = events(response.iter_lines(), "tick")
        kinds = [kind for _, kind, _ in first]
        assert kinds.count("job") == 1 and "health" in kinds
        last_id, _, data = next(event for event in first if event[1] == "job")
        assert json.loads(data)["job"] == JOB
        with client.stream("GET", "/api/v1/page/stream", headers={"Last-Event-ID": last_id}) as response:
            lines = response.iter_lines()
            again = events(lines, "tick")
            assert "job" not in [kind for _, kind, _ in again]
            hub.tokens.revoke(token.split("_")[1])
            assert events(lines, "signed_out")[-1][1] == "signed_out"


def test_the_stream_of_a_share_link_names_only_its_job(hub: Served):
    appended(
        hub.store,
        collectives=arrivals(4, 30, begin_s=recent_s(), cluster="second", comm=f"{5:016x}", node="x"),
    )
    assert hub.page.memory.wait_until_current()
    with hub.signed_in() as owner, hub.client() as reader:
        reader.get(owner.post("/api/v1/page/share", json={"job": JOB}).json()["path"])
        with reader.stream("GET", "/api/v1/page/stream") as response:
            jobs = [
                json.loads(data)["job"]
                for _, kind, data in events(response.iter_lines(), "tick")
                if kind == "job"
            ]
        assert jobs == [JOB]


def test_polling_writes_one_audit_line_a_minute(hub: Served):
    now_ms = int(time.time()) * 1000
    window = {"job": JOB, "from": now_ms - 9000, "to": now_ms, "n": 9}
    with hub.signed_in() as client:
        token_id = client.get("/api/v1/page/about").json()["user"]["id"]
        for _ in range(5):
            assert client.get("/api/v1/page/matrix", params=window).status_code == 200
    lines = [json.loads(line) for line in (hub.folder / "audit.jsonl").read_text().splitlines()]
    own = [line for line in lines if line.get("token_id") == token_id and line["path"].endswith("matrix")]
    assert len(own) == 1
