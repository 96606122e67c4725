"""Tokens: valid tokens, ended tokens, and the contents of the file."""

import json
import os
import threading
from pathlib import Path

import pytest

from stallscope.errors import BadInput, NotAllowed, NotAuthenticated, NotFound, StorageFailed
from stallscope.serve.tokens import FILE_NAME, SCOPES, Identity, Tokens, bearer, token_in

from ..patience import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def test_a_token_lets_its_tenant_in_with_its_scopes(path: Path):
    token = Tokens(path).create(["read", "ingest"], "team-a")
    identity = Tokens(path).identity(bearer(token))
    assert identity == Identity("team-a", frozenset({"ingest", "read"}), token.split("_")[1])
    identity.require("read")
    with pytest.raises(NotAllowed, match="lacks the scope 'sql'"):
        identity.require("sql")


def test_a_running_hub_applies_revocations_by_another_process(path: Path):
    of_the_hub, of_the_command = Tokens(path), Tokens(path)
    token = of_the_command.create(["read"], "a")
    token_id = of_the_hub.identity(bearer(token)).token_id
    of_the_command.revoke(token_id)
    with pytest.raises(NotAuthenticated, match="is revoked"):
        of_the_hub.identity(bearer(token))


def test_a_hub_that_checks_the_file_at_intervals_accepts_a_new_token_at_once(path: Path):
    of_the_hub, of_the_command = Tokens(path, recheck_s=3600), Tokens(path)
    old, new = of_the_command.create(["read"], "a"), of_the_command.create(["read"], "a")
    old_id = of_the_hub.identity(bearer(old)).token_id
    of_the_command.revoke(old_id)
    newest = of_the_command.create(["read"], "a")
    assert of_the_hub.identity(bearer(new)).tenant == "a"
    assert of_the_hub.identity(bearer(old)).tenant == "a"  # not checked again yet
    assert of_the_hub.identity(bearer(newest)).tenant == "a"  # unknown, so the file is read
    with pytest.raises(NotAuthenticated, match="is revoked"):
        of_the_hub.identity(bearer(old))


def test_a_hub_that_checks_the_file_at_intervals_applies_a_revocation_after_the_interval(path: Path):
    of_the_hub, of_the_command = Tokens(path, recheck_s=0.01), Tokens(path)
    token = of_the_command.create(["read"], "a")
    of_the_command.revoke(of_the_hub.identity(bearer(token)).token_id)

    def is_refused() -> bool:
        try:
            of_the_hub.identity(bearer(token))
        except NotAuthenticated:
            return True
        return False

    until(is_refused)


def test_a_token_ends_when_its_time_is_over(path: Path):
    now = [1000.0]
    tokens = Tokens(path, now_s=lambda: now[0])
    token = tokens.create(["read"], "a", expires_in_s=60)
    now[0] = 1059.0
    assert tokens.identity(bearer(token)).tenant == "a"
    now[0] = 1060.0
    with pytest.raises(NotAuthenticated, match="is expired"):
        tokens.identity(bearer(token))


@pytest.mark.parametrize(
    "spoil", [str.upper, lambda t: t[:-1], lambda t: t + "A", lambda t: "", lambda t: "Ω" * 5]
)
def test_anything_else_is_refused_and_never_repeated(path: Path, spoil):
    tokens = Tokens(path)
    token = tokens.create(["read"], "a")
    with pytest.raises(NotAuthenticated) as refused:
        tokens.identity(bearer(spoil(token)))
    assert token.split("_", 2)[2] not in str(refused.value)
    for header in (None, "", "Basic YTpi", token, f"Token {token}"):
        with pytest.raises(NotAuthenticated):
            tokens.identity(header)


def test_an_expired_token_id_with_a_wrong_secret_is_reported_as_unknown(path: Path):
    tokens = Tokens(path, now_s=lambda: 1000.0)
    first, second = tokens.create(["read"], "a", expires_in_s=-1), tokens.create(["read"], "a")
    mixed = f"sst_{first.split('_')[1]}_{second.split('_', 2)[2]}"
    with pytest.raises(NotAuthenticated, match="the token is unknown"):
        tokens.identity(bearer(mixed))


def test_the_file_holds_no_token_and_is_for_its_owner_only(path: Path):
    token = Tokens(path).create(SCOPES, "a")
    assert token.split("_", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_file_readable_by_others_is_refused_with_a_remedy(path: Path):
    Tokens(path).create(["read"], "a")
    path.chmod(0o640)
    with pytest.raises(StorageFailed, match="chmod 600"):
        Tokens(path)


def test_many_makers_at_once_lose_no_token(path: Path):
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(Tokens(path).create(["read"], "a"))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = Tokens(path)
    assert {tokens.identity(bearer(token)).token_id for token in made} == {e.id for e in tokens.listed()}
    assert len(made) == 12
    assert not list(path.parent.glob("*.part*"))


def test_scopes_and_tenants_that_do_not_exist_are_refused(path: Path):
    tokens = Tokens(path)
    with pytest.raises(BadInput, match="unknown scope 'write'"):
        tokens.create(["read", "write"], "a")
    with pytest.raises(BadInput, match="needs a scope"):
        tokens.create([" "], "a")
    for tenant in ("", "A", "../b", "a" * 64):
        with pytest.raises(BadInput, match="tenant"):
            tokens.create(["read"], tenant)
    with pytest.raises(NotFound, match="token list"):
        tokens.revoke("nothere")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "tokens": [{}]}'])
def test_a_damaged_file_is_an_error_and_not_an_open_door(path: Path, content: str):
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(StorageFailed, match="damaged"):
        Tokens(path)


@pytest.mark.parametrize(
    "wrong",
    [{"id": []}, {"id": None}, {"scopes": [[]]}, {"sha256": 5}, {"sha256": "\u00e9"}, {"expires_at": []}],
    ids=str,
)
def test_a_value_of_another_type_in_a_running_hub_refuses_every_token(path: Path, wrong: dict[str, object]):
    tokens = Tokens(path)
    authorization = f"Bearer {tokens.create(['read'], 'a')}"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "tokens": [content["tokens"][0] | wrong]}))
    with pytest.raises(StorageFailed, match="damaged"):
        tokens.identity(authorization)
    path.write_text(json.dumps(content))
    assert tokens.identity(authorization).tenant == "a"


def test_a_file_nested_too_deeply_is_damaged(path: Path):
    path.write_text("[" * 200_000)
    path.chmod(0o600)
    with pytest.raises(StorageFailed, match="damaged"):
        Tokens(path)


def test_a_file_of_a_newer_version_is_refused(path: Path):
    path.write_text(json.dumps({"format": 2, "tokens": []}))
    path.chmod(0o600)
    with pytest.raises(StorageFailed, match="newer"):
        Tokens(path)


def test_a_token_file_may_be_the_output_of_the_command(path: Path, tmp_path: Path):
    token = Tokens(path).create(["ingest"], "a")
    file = tmp_path / "token"
    file.write_text(f"some words\n{token}\n\n")
    assert token_in(file) == token
    file.write_text("nothing\n")
    with pytest.raises(BadInput, match="contains no token"):
        token_in(file)
    with pytest.raises(NotFound, match="--token-file"):
        token_in(tmp_path / "absent")


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path):
    if os.geteuid() == 0:
        folder = Path("/proc/nowhere")
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
    with pytest.raises(StorageFailed, match="cannot be read or written"):
        Tokens(folder / FILE_NAME).create(["read"], "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_created_by_root_have_the_owner_of_the_folder(path: Path):
    os.chown(path.parent, 12345, 23456)
    Tokens(path).create(["read"], "a")
    assert {(p.stat().st_uid, p.stat().st_gid) for p in path.parent.iterdir()} == {(12345, 23456)}


def test_a_token_generated_elsewhere_is_accepted_until_it_is_revoked(path: Path):
    token = f"sst_{'0a' * 6}_{'x' * 43}"
    tokens = Tokens(path)
    assert tokens.accept(token, ["ingest"], "default") == "0a" * 6
    assert tokens.identity(bearer(token)) == Identity("default", frozenset({"ingest"}), "0a" * 6)
    tokens.accept(token, ["admin"], "default")
    assert tokens.identity(bearer(token)).scopes == {"ingest", "admin"}
    tokens.revoke("0a" * 6)
    tokens.accept(token, ["ingest"], "default")
    with pytest.raises(NotAuthenticated, match="revoked"):
        tokens.identity(bearer(token))
    with pytest.raises(BadInput, match="sst_"):
        tokens.accept("a-token-in-another-form", ["ingest"], "default")
