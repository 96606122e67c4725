"""Secrets do not appear in any message, wherever a user has put them."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from stallscope.alerts.config import load as load_alerts
from stallscope.alerts.receivers.http import DeliveryFailed, post
from stallscope.check import bundle
from stallscope.credentials import from_environment, header_value, masked, shown_path
from stallscope.errors import BadInput, StallscopeError
from stallscope.exporters.otlp_wire import wire
from stallscope.query.remote_nodes import host_and_port
from stallscope.rates import load as load_rates
from stallscope.serve.client import HubClient
from stallscope.serve.tokens import token_in
from stallscope.settings import effective

SECRET = "hunter2Xhunter2"
TOKEN = f"sst_0123456789ab_{'s3cret' * 7}x"
JWT = f"eyJhbGciOiJSUzI1NiJ9.eyJ{'c2VjcmV0' * 3}.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "remains"),
    [
        (f"token {TOKEN} is wrong", "token sst_0123456789ab_*** is wrong"),
        (f"{JWT}: the file does not exist", "***: the file does not exist"),
        (f"Invalid header value b'Bearer {SECRET}\\n{SECRET}'", "Invalid header value b'Bearer ***'"),
        (f"https://ann:{SECRET}@host:8081/a: no", "https://ann:***@host:8081/a: no"),
        (f"https://:{SECRET}@host", "https://:***@host"),
        (f"http://ann:{SECRET}/{SECRET}@{SECRET}@host/", "http://ann:***@host/"),
        (f"'ann:{SECRET}@host:8443' is not a node", "'ann:***@host:8443' is not a node"),
        (f"GET /v1?access_token={SECRET}&a=1 failed", "GET /v1?access_token=***&a=1 failed"),
        (f"No such option --token={SECRET}", "No such option --token=***"),
        ("https://host:8081/a, [::1]:8443 and mail@host.example stay", None),
        ("train.py:12: rank 3 of host-a:29500 is late", None),
        ("send `Authorization: Bearer TOKEN`", None),
        ("hub.example:4317, --token-file /etc/stallscope/token", None),
    ],
)
def test_a_secret_is_masked_and_the_other_words_stay(text: str, remains: str | None):
    assert masked(text) == (text if remains is None else remains)
    assert SECRET not in str(BadInput(text))


def test_no_class_of_errors_bypasses_the_mask():
    classes = StallscopeError.__subclasses__()
    for each in classes:
        classes += each.__subclasses__()
    assert len(classes) > 15
    assert all("s3cret" not in str(each(f"x {TOKEN}")) for each in classes)


def test_a_token_in_place_of_its_file_is_not_repeated(tmp_path: Path):
    for given in (TOKEN, JWT, "0123456789abcdef0123456789abcdef"):
        with pytest.raises(StallscopeError) as refused:
            token_in(Path(given))
        assert given[17:] not in str(refused.value)
    assert shown_path(tmp_path / "ingest.token") == str(tmp_path / "ingest.token")


def test_a_settings_file_that_is_not_yaml_is_not_quoted(tmp_path: Path):
    path = tmp_path / "x.yaml"
    for text in (f'node: a\nowner_hash_key: "{SECRET}\n', f"a: [{SECRET}\nb: 1", f"{SECRET}\x01"):
        path.write_text(text)
        for read in (lambda p: effective({}, {}, p), load_alerts, load_rates):
            with pytest.raises(StallscopeError, match="not valid YAML") as refused:
                read(path)
            assert SECRET not in str(refused.value)


def test_a_secret_setting_is_neither_quoted_nor_printed_nor_bundled(tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text(f"owner_hash_key: [{SECRET}, 1]\n")
    with pytest.raises(BadInput) as refused:
        effective({}, {}, path)
    assert SECRET not in str(refused.value) and "owner_hash_key" in str(refused.value)
    path.write_text(
        f"owner_hash_key: {SECRET}\nray_address: http://ann:{SECRET}@ray:8265\ndb: {tmp_path}/no.db\n"
    )
    for words in ((), ("--json",), ("owner_hash_key",), ("ray_address", "--json")):
        done = _command("settings", *words, "--settings", str(path))
        assert done.returncode == 0 and SECRET not in done.stdout and "***" in done.stdout
    bundle.write(tmp_path / "b.tar.gz", {}, effective({}, {}, path), with_names=True)
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        texts = [(tar.extractfile(member) or io.BytesIO()).read().decode() for member in tar]
    assert not any(SECRET in text for text in texts) and any("***" in text for text in texts)


def test_headers_refuse_a_secret_with_a_line_break_without_repeating_it():
    for text in (f"a\n{SECRET}", f"{SECRET}\u00e9", f"{SECRET}\r", f"\0{SECRET}"):
        with pytest.raises(ValueError, match="SOURCE") as refused:
            header_value(text, "SOURCE")
        assert SECRET not in str(refused.value)
    with pytest.raises(ValueError, match="SLURM_JWT") as refused:
        from_environment("SLURM_JWT", {"SLURM_JWT": f"a\n{SECRET}"})
    assert SECRET not in str(refused.value)
    for scheme in ("http", "grpc"):
        with pytest.raises(BadInput, match="OTEL_EXPORTER_OTLP_HEADERS") as failed:
            wire(f"{scheme}://127.0.0.1:1", {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=a%0A{SECRET}"})
        assert SECRET not in str(failed.value)
    with pytest.raises(DeliveryFailed) as undelivered:
        post("http://127.0.0.1:1/", {}, {"Authorization": f"Bearer a\n{SECRET}"})
    assert SECRET not in str(undelivered.value)


def test_a_password_in_an_address_is_refused_or_sent_and_never_printed():
    address = f"ann:{SECRET}@127.0.0.1"
    for refuse in (
        lambda: wire(f"http://{address}:1", {}),
        lambda: HubClient(f"https://{address}:1", TOKEN).tools(),
        lambda: host_and_port(f"{address}:1"),
        lambda: host_and_port(address),
    ):
        with pytest.raises(BadInput) as refused:
            refuse()
        assert SECRET not in str(refused.value)
    with pytest.raises(DeliveryFailed) as failed:
        post(f"http://{address}:1/{SECRET} x", {})
    assert SECRET not in str(failed.value)
    with pytest.raises(DeliveryFailed, match=r"^127\.0\.0\.1:1 ") as failed:
        post(f"http://{address}:1/{SECRET}", {}, timeout_s=1)
    assert SECRET not in str(failed.value)


def test_a_token_file_of_two_lines_is_not_printed_by_a_command(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}{SECRET}\n{TOKEN}\n")
    words = (["query", "--nodes", "127.0.0.1:1", "SELECT 1"], ["ask", "--hub", "http://127.0.0.1:1"])
    for command in words:
        done = _command(*command, "--token-file", str(file))
        assert done.returncode and "Traceback" not in done.stderr
        assert SECRET not in done.stderr and "s3cret" not in done.stderr


def _command(*words: str) -> "subprocess.CompletedProcess[str]":
    code = "from stallscope.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
