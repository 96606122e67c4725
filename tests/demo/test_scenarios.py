"""Every scenario of the demo gets the right answer and prints its lessons."""

import json

import pytest
from typer.testing import CliRunner, Result

from stallscope.cli import app
from stallscope.demo import faults, scenarios
from stallscope.demo.scenarios import SCENARIOS, Scenario
from stallscope.errors import BadInput

RIGHT = {
    "incident": ("straggler", [2], "block_io"),
    "memcpy-bottleneck": ("straggler", [2], "host_device_copy"),
    "periodic-spike": ("straggler", [2], "host_sleep"),
    "cpu-contention": ("straggler", [2], "cpu_preemption"),
    "gpu-steal": ("device", [2], "gpu_shared"),
    "straggler": ("straggler", [2], "input_starvation"),
    "hang": ("hang", [2], "missing_rank"),
}


def told(*words: str) -> Result:
    return CliRunner().invoke(app, ["demo", *words])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_made_up_scenario_has_the_right_answer(scenario: Scenario):
    report = json.loads(told(scenario.name, "--no-bpf", "--json").stdout)
    if scenario.name not in RIGHT:
        assert report["healthy"]
        assert "warm-up" in report["benign"][0]["what"]
        return
    (verdict,) = report["verdicts"]
    assert (verdict["kind"], verdict["ranks"], verdict["causes"][0]["cause"]) == RIGHT[scenario.name]


def test_the_live_fault_has_the_same_cause_as_the_simulated_fault():
    for scenario in SCENARIOS:
        assert faults.FAULTS[scenario.fault].cause == RIGHT.get(scenario.name, ("", [], ""))[2]


def test_all_scenarios_are_printed_in_order_with_their_lessons():
    stdout = told("all", "--no-bpf").stdout
    assert [line.split()[1].rstrip(":") for line in stdout.splitlines() if line.startswith("== ")] == [
        scenario.name for scenario in SCENARIOS
    ]
    assert stdout.count("Lessons:") == len(SCENARIOS)
    for scenario in SCENARIOS:
        assert all(line in stdout for line in scenario.learn)


def test_the_list_names_each():
    assert [line.split()[0] for line in told("list").stdout.splitlines()] == [s.name for s in SCENARIOS]
    assert [row["name"] for row in json.loads(told("list", "--json").stdout)] == [s.name for s in SCENARIOS]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("slep",), "no scenario 'slep'.*incident.*sleep"),
        (("--no-bpf",), "give a name from"),
        (("hang", "--no-bpf", "--live"), "exclude"),
        (("net", "--no-bpf"), "cannot be simulated"),
    ],
)
def test_invalid_scenario_arguments_are_refused(words: tuple[str, ...], says: str):
    with pytest.raises(BadInput, match=says):
        CliRunner().invoke(app, ["demo", *words], catch_exceptions=False)


def test_a_fault_name_is_a_valid_scenario():
    assert scenarios.named("sleep").fault == "sleep"


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_shared_gpu_slows_down_the_whole_job_and_no_rank_is_named():
    changes = told("gpu-steal", "--live", "--json")
    (verdict,) = json.loads(changes.stdout)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("change", [])
    assert "device or fabric" in verdict["abstained_because"]
