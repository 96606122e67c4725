"""`stallscope settings`: values, and where they come from."""

import json

from stallscope.settings import TABLE


def test_every_setting_is_listed_with_its_origin(run, monkeypatch, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("node: from-file\n")
    monkeypatch.setenv("STALLSCOPE_MIN_LATE_MS", "7.5")
    code, out, err = run("settings", "--settings", path)
    assert (code, err) == (0, "")
    output = {line.split()[0]: line.split() for line in out.splitlines()}
    assert set(output) == {setting.name for setting in TABLE}
    assert output["node"][1:] == ["from-file", f"{path}:1"]
    assert output["min_late_ms"][1:] == ["7.5", "STALLSCOPE_MIN_LATE_MS"]
    assert output["cause_share"][1:] == ["0.8", "default"]


def test_json_has_types_and_names(run, monkeypatch):
    monkeypatch.setenv("STALLSCOPE_MAX_DB", "2GB")
    data = json.loads(run("settings", "--json")[1])
    assert data["max_db_bytes"] == {
        "value": 2_000_000_000,
        "from": "STALLSCOPE_MAX_DB",
        "environment": "STALLSCOPE_MAX_DB",
        "flag": "--max-db",
    }
    assert data["usd_per_gpu_hour"]["value"] is None


def test_one_value_alone(run):
    assert run("settings", "cause_share") == (0, "0.8\n", "")
    assert run("settings", "usd_per_gpu_hour", "--json")[1] == "null\n"


def test_an_unknown_name_is_answered_with_the_closest(run, tmp_path):
    code, out, err = run("settings", "cause_shar")
    assert (code, out) == (2, "")
    assert "did you mean cause_share?" in err
    path = tmp_path / "settings.yaml"
    path.write_text("cause_shar: 0.9\n")
    code, _, err = run("settings", "--settings", path)
    assert code == 2
    assert "did you mean cause_share?" in err
