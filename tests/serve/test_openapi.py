"""The OpenAPI document is valid, and the hub conforms to it (schemathesis)."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.serve.answering import answering
from tests.serve.tools import cluster

from stallscope.serve import tools
from stallscope.serve.openapi import document
from stallscope.serve.sql.workers import QueryLimits
from stallscope.serve.tokens import bearer
from stallscope.serve.tools.tool_registry import collected

DOCUMENT = document(collected(tools), sql_tool="fleet.cluster.run_analysis")
schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.update(phases=["fuzzing"])
TAKES_SQL = ("/api/v1/sql", "/api/v1/tools/fleet.cluster.run_analysis")
"""A schema cannot define valid SQL: other text is refused with 400 although it matches the schema."""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store", limits=QueryLimits(timeout_s=10), n_workers=3) as hub:
        cluster.fill(hub.store, "a", "alpha")
        with answering(hub, folder) as result:
            yield result


@pytest.fixture(scope="module")
def token(there):
    return there.token(("read", "sql", "admin"), "a")


@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_the_hub_conforms_to_its_openapi_document(there, token, case):
    body = case.body if isinstance(case.body, dict) else {}
    # Nor can it define that one time is before another.
    has_window = body.get("from") is not None and body.get("to") is not None
    excluded = [positive_data_acceptance] if case.path in TAKES_SQL or has_window else []
    headers = {"Authorization": bearer(token)}
    case.call_and_validate(base_url=there.url, headers=headers, timeout=30, excluded_checks=excluded)


def test_the_document_that_is_served_has_every_tool(there, token):
    connection = http.client.HTTPConnection(urlsplit(there.url).netloc)
    connection.request("GET", "/api/v1/openapi.json", headers={"Authorization": bearer(token)})
    served = json.loads(connection.getresponse().read())
    connection.close()
    assert served == json.loads(json.dumps(DOCUMENT))
    assert served["openapi"].startswith("3.1.")
    for name, tool in collected(tools).items():
        operation = served["paths"][f"/api/v1/tools/{name}"]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == tool.input_schema
