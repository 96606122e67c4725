"""The task of a container, from a recorded answer of the metadata endpoint (ECS developer guide, version 4)."""

import json

import pytest

from stallscope.capture.owners.ecs import VARIABLE, Ecs

TASK = {
    "Cluster": "default",
    "TaskARN": "arn:aws:ecs:us-west-2:111122223333:task/default/158d1c8083dd49d6b527399fd6414f5c",
    "Family": "trainer",
    "Revision": "26",
    "ServiceName": "night",
}
ADDRESS = "http://169.254.170.2/v4/158d1c8083dd49d6b527399fd6414f5c-1234"


def test_a_task_is_read_once_for_each_address():
    asked: list[str] = []

    def answer(address: str) -> str:
        asked.append(address)
        return json.dumps(TASK)

    ecs = Ecs(answer)
    hints = {VARIABLE: ADDRESS}
    assert ecs.labels({}, hints) == {}
    ecs.refresh()
    ecs.refresh()
    assert asked == [f"{ADDRESS}/task"]
    assert ecs.labels({}, hints) == {
        "task": "158d1c8083dd49d6b527399fd6414f5c",
        "workload_kind": "ECS task",
        "workload": "trainer",
        "account": "111122223333",
        "queue": "night",
    }


def test_addresses_that_a_process_made_up_are_not_asked():
    ecs = Ecs(lambda address: 1 / 0)
    for address in ("http://10.0.0.1/v4/x", "http://169.254.170.2/v4/../x", "http://169.254.170.2.evil/v4/x"):
        assert ecs.labels({}, {VARIABLE: address}) == {}
    ecs.refresh()


def test_an_address_without_an_answer_does_not_hide_other_tasks():
    def answer(address: str) -> str:
        if "/ended/" in address:
            raise OSError("refused")
        return json.dumps(TASK)

    ecs = Ecs(answer)
    hints = [{VARIABLE: f"http://169.254.170.2/v4/{name}"} for name in ("ended", "running")]
    for each in hints:
        ecs.labels({}, each)
    with pytest.raises(OSError, match="refused"):
        ecs.refresh()
    assert ecs.labels({}, hints[1])
    assert not ecs.labels({}, hints[0])
