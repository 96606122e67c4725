"""The documented Grafana setup, sent as its Infinity data source sends it, returns flat rows.

The plugin's requests, by its source (grafana-infinity-datasource, pkg/infinity/headers.go and request.go): the body as
it was typed, with Grafana's variables in it replaced; for a raw body the content type that was chosen; for the type
JSON an Accept header with two kinds; a bearer token; Go's user agent. With the parser "backend" the rows found under
the root become a frame, a column for each key: an object or a list in one would be text.
"""

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.serve.answering import Answering, answering
from tests.serve.tools import cluster

CLIENTS = Path(__file__).parents[2] / "docs" / "clients.md"
END_NS = cluster.T0_NS + cluster.N_ROUNDS * cluster.STEP_NS
RANGE = {"__from": str(cluster.T0_NS // 1_000_000 - 1000), "__to": str(END_NS // 1_000_000 + 1000)}


def panels() -> dict[str, tuple[str, str, str]]:
    """URL, body and root by the name of the panel, as the page has them."""
    text = CLIENTS.read_text().partition("## Grafana")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    return {name: (url, body, root) for name, url, body, root in rows}


def replaced(text: str) -> str:
    """The text with Grafana's variables replaced, each as plain text."""
    for name, value in RANGE.items():
        text = text.replace(f"${{{name}}}", value)
    return text


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store") as hub:
        cluster.fill(hub.store, "a", "alpha")
        with answering(hub, folder) as result:
            yield result


def sent(there: Answering, url: str, body: str, *, token: str) -> tuple[int, Any]:
    where = urlsplit(replaced(url).replace("$HUB", there.url))
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    connection.request(
        "POST",
        where.path,
        body=replaced(body).encode(),
        headers={
            "User-Agent": "Go-http-client/1.1",
            "Accept": "application/json;q=0.9,text/plain",
            "Content-Type": "application/json",
            "Authorization": f"Bearer {token}",
            "Accept-Encoding": "gzip",
        },
    )
    answer = connection.getresponse()
    assert answer.headers.get_content_type() == "application/json"
    trace = answer.read()
    connection.close()
    return answer.status, json.loads(trace)


def is_flat(value: object) -> bool:
    """A scalar, or a list of scalars such as the ranks of a verdict, which a panel shows as text."""
    scalars = value if isinstance(value, list) else [value]
    return all(each is None or isinstance(each, str | int | float) for each in scalars)


@pytest.mark.parametrize("name", sorted(panels()))
def test_a_panel_as_documented_gets_flat_rows(there: Answering, name: str):
    url, body, root = panels()[name]
    assert "${" not in replaced(body)
    status, output = sent(there, url, body, token=there.token(("read",), "a"))
    assert status == 200, output
    rows = output[root]
    assert rows and len({tuple(row) for row in rows}) == 1, "one set of columns"
    for row in rows:
        assert not {name: value for name, value in row.items() if not is_flat(value)}


def test_there_are_the_three_panels_and_they_name_the_straggler(there: Answering):
    known = panels()
    assert len(known) == 3
    url, body, root = known["late ranks (table)"]
    _, output = sent(there, url, body, token=there.token(("read",), "a"))
    assert [row["rank"] for row in output[root]] == [cluster.STRAGGLER]


def test_errors_are_in_the_field_that_a_panel_shows(there: Answering):
    url, body, _ = panels()["late ranks (table)"]
    status, output = sent(there, url, body, token="wrong")
    assert status == 401 and output["error"]
    status, output = sent(there, url, '{"from": ${__unknown}}', token=there.token(("read",), "a"))
    assert status == 400 and output["error"]
