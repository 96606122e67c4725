"""Routes: conditions, order, groups."""

import pytest
from tests.alerts.builders import T0_NS, S, incident

from stallscope.alerts.config import Match, validated
from stallscope.alerts.routing import group_key, is_due, matches, targets

RECEIVERS = {name: {"type": "webhook", "url": "http://x"} for name in ("first", "second")}


def receivers(*routes: dict[str, object]) -> list[str]:
    config = validated({"receivers": RECEIVERS, "routes": list(routes)}, "alerts.yaml")
    return [target.receiver for target in targets(config, incident())]


def test_first_matching_route_ends_the_search():
    assert receivers({"receivers": "first"}, {"receivers": "second"}) == ["first"]
    assert receivers({"receivers": "first", "continue": True}, {"receivers": "second"}) == ["first", "second"]
    assert receivers({"receivers": "first", "match": {"kind": "hang"}}, {"receivers": "second"}) == ["second"]


def test_receiver_that_two_routes_name_gets_one_alert():
    assert receivers({"receivers": "first", "continue": True}, {"receivers": "first"}) == ["first"]


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({}, True),
        ({"node": ("node-*",)}, True),
        ({"node": ("other",)}, False),
        ({"cluster": ("c?",), "severity": ("high", "critical")}, True),
        ({"cluster": ("c1",), "severity": ("low",)}, False),
        ({"tenant": ("default",), "kind": ("straggler",)}, True),
    ],
)
def test_every_condition_must_accept_the_incident(match, expected):
    assert matches(Match(**match), incident()) is expected


@pytest.mark.parametrize(
    ("match", "owner", "expected"),
    [
        ({"owner": ("ann",)}, {"user": "ann", "account": "vision"}, True),
        ({"owner": ("vis*",)}, {"user": "ann", "account": "vision"}, True),
        ({"owner": ("bob",)}, {"user": "ann", "account": "vision"}, False),
        ({"owner": ("*",)}, {}, False),
        ({"namespace": ("train-?",)}, {"namespace": "train-a"}, True),
        ({"namespace": ("train-?",)}, {"user": "train-a"}, False),
        ({"job": ("47*",)}, {"job": "4711"}, True),
        ({"job": ("train",)}, {"job": "4711", "job_name": "train"}, True),
        ({"job": ("train",)}, {"job": "4711", "user": "train"}, False),
        ({"owner": ("llama",)}, {"workload": "llama"}, True),
        ({"owner": ("vllm.service",)}, {"unit": "vllm.service"}, True),
        ({"namespace": ("train-a",), "owner": ("ann",)}, {"namespace": "train-a", "user": "bob"}, False),
    ],
)
def test_owner_and_namespace_of_the_job_decide_the_route(match, owner, expected):
    assert matches(Match(**match), incident(owner=owner)) is expected


def test_group_key_depends_on_the_grouped_fields_only():
    first, second = incident("a", cluster="c1"), incident("b", cluster="c2")
    assert group_key(("incident",), first) != group_key(("incident",), second)
    assert group_key(("node",), first) == group_key(("node",), second)
    assert group_key(("node", "cluster"), first) != group_key(("node", "cluster"), second)
    assert group_key(("node",), first) != group_key(("node",), incident("a", tenant="other"))


def test_critical_incident_ignores_quiet_hours():
    config = validated(
        {
            "receivers": RECEIVERS,
            "routes": [{"receivers": "first", "quiet_hours": {"from": "00:00", "to": "23:59"}}],
        },
        "alerts.yaml",
    )
    (route,) = config.routes
    assert not is_due(route, incident(), T0_NS + S)
    assert is_due(route, incident(severity="critical"), T0_NS + S)
