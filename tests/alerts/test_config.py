"""The alerts file: errors name the key and the remedy, secrets appear in no message."""

from datetime import UTC, datetime

import pytest
from tests.alerts.builders import config

from stallscope.alerts.config import Secret, load, validated
from stallscope.errors import BadInput, NotFound

HOOK = {"receivers": {"hook": {"type": "webhook", "url": "http://x"}}, "routes": [{"receivers": ["hook"]}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routes": []}, "routes: Tuple should have at least 1 item"),
        ({"routes": [{"receivers": "pager"}]}, "route 1 names the receiver 'pager'; the receivers are: hook"),
        ({"routes": [{"receivers": "hook", "sevrity": "high"}]}, "routes.0.sevrity: unknown key"),
        ({"routes": [{"receivers": "hook", "min_duration": "soon"}]}, "'soon' is not a duration"),
        ({"routes": [{"receivers": "hook", "match": {"severity": "bad"}}]}, "routes.0.match.severity.0"),
        ({"receivers": {"hook": {"type": "irc"}}}, "receivers.hook"),
        ({"receivers": {"hook": {"type": "slack"}}}, "receivers.hook.url: Field required"),
        (
            {
                "routes": [
                    {"receivers": "hook", "quiet_hours": {"from": "22:00", "to": "07:00", "zone": "Mars"}}
                ]
            },
            "'Mars' is not a time zone",
        ),
    ],
)
def test_wrong_key_is_named(change, message):
    with pytest.raises(BadInput, match=r"^alerts\.yaml: ") as caught:
        validated(HOOK | change, "alerts.yaml")
    assert message in str(caught.value)


def test_secret_in_the_file_is_refused_without_repeating_it():
    receivers = {"hook": {"type": "slack", "url": "https://hooks.slack.com/services/T0/B0/secret"}}
    with pytest.raises(BadInput, match="a secret is not written here") as caught:
        validated(HOOK | {"receivers": receivers}, "alerts.yaml")
    assert "hooks.slack.com" not in str(caught.value)


def test_secret_is_read_from_a_file_or_the_environment(tmp_path):
    (tmp_path / "key").write_text("k1\n")
    assert Secret(file=tmp_path / "key").value() == "k1"
    assert Secret(env="KEY").value({"KEY": "k2"}) == "k2"
    with pytest.raises(NotFound, match="environment variable KEY is empty"):
        Secret(env="KEY").value({})


def test_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"none\.yaml: the alerts file does not exist"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("receivers: [")
    with pytest.raises(BadInput, match="not valid YAML"):
        load(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("moment", "is_quiet"),
    [
        ("2026-11-27T21:30", True),  # a Friday, 22:30 in Berlin
        ("2026-11-28T05:30", True),  # the morning after it
        ("2026-11-28T06:30", False),
        ("2026-11-28T22:30", False),  # a Saturday
    ],
)
def test_quiet_hours_past_midnight_belong_to_their_first_day(moment, is_quiet):
    hours = {"from": "22:00", "to": "07:00", "zone": "Europe/Berlin", "days": ["fri"]}
    (route,) = config(quiet_hours=hours).routes
    assert (
        route.quiet_hours.contains(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()) is is_quiet
    )
