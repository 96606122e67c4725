"""The settings table: sources of values, refused values, and remedies in the refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stallscope import cli, settings
from stallscope.diagnose.thresholds import Thresholds
from stallscope.errors import NotFound, UnknownSetting
from stallscope.settings import TABLE, Effective, Settings, effective


@pytest.fixture(autouse=True)
def no_file_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "DEFAULT_FILE", tmp_path / "none.yaml")


def in_force(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, path: Path | None = None
) -> Effective:
    return effective(flags or {}, environ or {}, path, host_name="host-a")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_defaults_apply_without_given_values():
    force = in_force()
    assert force.settings == Settings(node="host-a")
    assert set(force.origins) == {s.name for s in TABLE}
    assert force.origins["db"] == "default"
    assert force.origins["node"] == "host name"


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    path = written(tmp_path, "min_late_ms: 1\nmin_late_steps: 4\nnode: from-file\n")
    environ = {"STALLSCOPE_MIN_LATE_MS": "2", "STALLSCOPE_MIN_LATE_STEPS": "5"}
    force = in_force({"min_late_ms": 3, "cause_share": None}, environ, path)
    assert (force.settings.min_late_ms, force.origins["min_late_ms"]) == (3.0, "--min-late")
    assert (force.settings.min_late_steps, force.origins["min_late_steps"]) == (
        5,
        "STALLSCOPE_MIN_LATE_STEPS",
    )
    assert (force.settings.node, force.origins["node"]) == ("from-file", f"{path}:3")
    assert force.origins["cause_share"] == "default"


@pytest.mark.parametrize("setting", TABLE, ids=lambda s: s.name)
def test_every_setting_can_be_given_in_all_three_ways(setting, tmp_path):
    number = 2_000_000 if setting.about.maximum is None else 1 - setting.default  # a switch
    value = {int: number, float: setting.about.maximum or 7, str: "a", Path: "/tmp/a"}[setting.kind]
    wanted = setting.kind(value)
    assert wanted != setting.default
    path = written(tmp_path, f"{setting.name}: {value}\n")
    for result in (
        in_force({setting.name: value}),
        in_force({}, {setting.environment: str(value)}),
        in_force({}, {}, path),
    ):
        got = getattr(result.settings, setting.name)
        assert (got, type(got)) == (wanted, type(wanted))
        assert result.origins[setting.name] not in ("default", "host name")


def test_names_and_variables_are_unique_and_documented():
    for column in ("name", "environment"):  # a flag may belong to another setting in another command
        values = [getattr(s, column) for s in TABLE if getattr(s, column)]
        assert len(values) == len(set(values))
    for s in TABLE:
        assert s.about.meaning
        assert s.environment.startswith("STALLSCOPE_")


def test_every_flag_of_the_table_is_an_option_of_some_command():
    names = [info.name or info.callback.__name__ for info in cli.app.registered_commands]
    names += [group.name for group in cli.app.registered_groups]
    text = "".join(CliRunner().invoke(cli.app, [name, "--help"]).output for name in names)
    for flag in filter(None, (s.flag for s in TABLE)):
        assert re.search(rf"{flag}\b", text), flag


def test_every_default_is_a_value_the_setting_would_take():
    for s in TABLE:
        assert settings.parsed(s, s.default, "here") == s.default


def test_defaults_agree_with_the_thresholds_of_the_diagnosis():
    own_rows, thresholds = Settings(), Thresholds()
    assert own_rows.min_late_ms * 1_000_000 == thresholds.min_late_ns
    assert own_rows.min_late_steps == thresholds.min_late_steps
    assert own_rows.cause_share == thresholds.cause_share
    assert own_rows.hang_after_s * 1_000_000_000 == thresholds.hang_after_ns
    assert own_rows.hang_gap_factor == thresholds.hang_gap_factor


@pytest.mark.parametrize(
    ("given", "wanted_bytes"),
    [
        ("10GB", 10**10),
        ("2 GiB", 2**31),
        ("1500000", 1_500_000),
        ("1.5gb", 1_500_000_000),
        ("1_000_000B", 10**6),
    ],
)
def test_sizes_carry_units(given, wanted_bytes):
    assert in_force({}, {"STALLSCOPE_MAX_DB": given}).settings.max_db_bytes == wanted_bytes


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({"max_db_bytes": "10XB"}, {}, "--max-db: max_db_bytes is '10XB'; give a size"),
        ({"max_db_bytes": "1e400GB"}, {}, "give a size"),
        ({"max_db_bytes": 5}, {}, "give 1,000,000 or more"),
        ({"min_late_steps": 2.5}, {}, "give a whole number"),
        ({"min_late_steps": True}, {}, "give a whole number"),
        ({"cause_share": 1.2}, {}, "give 1 or less"),
        ({"min_late_ms": "nan"}, {}, "give a number"),
        ({"db": ""}, {}, "give a path"),
        ({"node": 7}, {}, "give a text"),
        ({}, {"STALLSCOPE_HANG_AFTER_S": "soon"}, "STALLSCOPE_HANG_AFTER_S: hang_after_s is 'soon'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_place_and_advice(flags, environ, expected):
    with pytest.raises(UnknownSetting) as refused:
        in_force(flags, environ)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_name_is_refused_with_a_suggestion(tmp_path):
    path = written(tmp_path, "# ours\nhang_afters: 3\n")
    with pytest.raises(
        UnknownSetting, match=r"yaml:2: unknown setting hang_afters; did you mean hang_after_s"
    ):
        in_force({}, {}, path)
    with pytest.raises(UnknownSetting, match="did you mean STALLSCOPE_DB"):
        in_force({}, {"STALLSCOPE_DBB": "x"})
    with pytest.raises(UnknownSetting, match="did you mean max_db_bytes"):
        in_force({"max_db_byte": 1})
    with pytest.raises(UnknownSetting, match=r"docs/reference/settings\.md lists all settings"):
        in_force({}, {"STALLSCOPE_ZZZZZZ": "x"})


@pytest.mark.parametrize(("former", "name"), settings.RENAMED.items())
def test_a_renamed_setting_keeps_its_former_name_for_one_release(tmp_path, former, name):
    path = tmp_path / "settings.yaml"
    path.write_text(f"{former}: 3\n")
    assert getattr(in_force(path=path).settings, name) == 3
    variable = {f"STALLSCOPE_{former.upper()}": "4"}
    assert getattr(in_force(environ=variable, path=path).settings, name) == 4


def test_the_rest_of_the_environment_is_left_alone(tmp_path):
    environ = {"HOME": "/root", "STALLSCOPE_DATA": "/data", "stallscope_db": "x", "STALLSCOPE_DB": ""}
    assert in_force({}, environ).settings == Settings(node="host-a")


def test_the_environment_can_name_the_file(tmp_path):
    path = written(tmp_path, "usd_per_gpu_hour: 2.5\n")
    assert in_force({}, {"STALLSCOPE_SETTINGS": str(path)}).settings.usd_per_gpu_hour == 2.5


def test_the_default_file_is_read_if_it_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "DEFAULT_FILE", written(tmp_path, "cause_share: 0.9\n"))
    assert in_force().settings.cause_share == 0.9


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_changes_no_settings(tmp_path, text):
    assert in_force({}, {}, written(tmp_path, text)).settings == Settings(node="host-a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- db\n", "must hold lines of the form"),
        ("db: [unclosed\n", "not valid YAML"),
        ("db: a\ndb: b\n", "settings.yaml:2: db was already set at"),
        ("db:\n", "db is None; give a path"),
        ("db: !!python/object:os.system {}\n", "not valid YAML"),
        ("hang_after_s: {a: 1}\n", "give a number"),
        ("yes: 1\n", "unknown setting yes"),
        ("nods: a:1\n", "did you mean nodes?"),
        ("fleet:\n  nods: a:1\n", "settings.yaml:2 (fleet): unknown setting nods; did you mean nodes?"),
        ("fleet:\n  tokenfile: a\n", "did you mean token_file?"),
        ("max_age_s: 999999999999d\n", "give at most 100 years"),
        ("max_age_s: 99999999999999999999\n", "give at most 100 years"),
        ("max_db_bytes: 99999999999999999999\n", "give less than"),
        ("min_late_steps: 99999999999999999999\n", "or less"),
        ("max_age_s: 5 parsecs\n", "give a number of seconds or a duration"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, text, expected):
    with pytest.raises(UnknownSetting) as refused:
        in_force({}, {}, written(tmp_path, text))
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(NotFound, match="the settings file does not exist"):
        in_force({}, {}, tmp_path / "gone.yaml")
    with pytest.raises(UnknownSetting, match=r"cannot be read \(Is a directory\)"):
        in_force({}, {}, tmp_path)
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UnknownSetting, match=r"cannot be read \(it is not UTF-8 text\)"):
        in_force({}, {}, path)


@pytest.mark.parametrize(
    ("given", "wanted_bytes"),
    [("500m", 500 * 10**6), ("10G", 10**10), ("2Gi", 2**31), ("0", 0), ("1t", 10**12)],
)
def test_sizes_in_the_short_forms_that_users_try(given, wanted_bytes):
    assert in_force({"max_db_bytes": given}).settings.max_db_bytes == wanted_bytes


@pytest.mark.parametrize(("given", "wanted_s"), [("7d", 604_800), ("90m", 5400), ("3600", 3600), ("0", 0)])
def test_an_age_is_a_duration(given, wanted_s):
    assert in_force({"max_age_s": given}).settings.max_age_s == wanted_s
    with pytest.raises(UnknownSetting, match="or 0 for no limit"):
        in_force({"max_age_s": "5s"})
    with pytest.raises(UnknownSetting, match="duration"):
        in_force({"max_age_s": "soon"})


@pytest.mark.parametrize("nodes", ["a:8443,b:8443", "[a:8443, b:8443]"])
def test_nodes_below_fleet_are_the_nodes(tmp_path, nodes):
    path = written(tmp_path, f"fleet:\n  nodes: {nodes}\n  token_file: /t\n")
    chosen = in_force({}, {}, path)
    assert (chosen.settings.nodes, chosen.settings.nodes_token_file) == ("a:8443,b:8443", Path("/t"))
    assert chosen.origins["nodes"] == f"{path}:2"
    with pytest.raises(UnknownSetting, match=r"yaml:2 \(fleet\): unknown setting tokn"):
        in_force({}, {}, written(tmp_path, "fleet:\n  tokn: /t\n"))


def test_no_number_of_the_table_is_unlimited():
    for setting in TABLE:
        if setting.kind in (int, float):
            with pytest.raises(UnknownSetting, match=setting.name):
                settings.parsed(setting, 10**30, "test")
