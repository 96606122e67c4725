"""Thousands of agents at once: the hub may ask them to send later, but each batch is stored once."""

import heapq
import queue
import random
import time

import httpx
import pytest
from tests.hub.test_hub import collectives
from tests.patience import PATIENCE_S

from stallscope.exporters.hub_channel import HubChannel, Target
from stallscope.exporters.hub_sender import Answer, Outcome
from stallscope.serve.tokens import bearer

from .conftest import Attacked

pytestmark = pytest.mark.live

N_AGENTS, N_CHANNELS = 3_000, 30


def test_three_thousand_agents_at_once_lose_nothing(attacked_alone: Attacked):
    """Each agent sends one batch; if the hub asks for it, again after the wait, as agents do."""
    target = Target(
        address=attacked_alone.address,
        node="n",
        cluster="many",
        token=lambda: attacked_alone.token,
        insecure=True,
    )
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    channels = [HubChannel(target) for _ in range(N_CHANNELS)]
    due = [(0.0, number) for number in range(N_AGENTS)]
    n_retries, n_stored, end_s = [0] * N_AGENTS, 0, time.monotonic() + PATIENCE_S
    try:
        while n_stored < N_AGENTS:
            assert time.monotonic() < end_s, f"{n_stored} batches are stored"
            while due and due[0][0] <= time.monotonic():
                _, number = heapq.heappop(due)
                channels[number % N_CHANNELS].send(
                    f"agent-{number}",
                    {"collectives": collectives(1, number)},
                    lambda answer, number=number: answers.put((number, answer)),
                )
            try:
                number, answer = answers.get(timeout=0.05)
            except queue.Empty:
                continue
            if answer.outcome is Outcome.ACKNOWLEDGED:
                n_stored += 1
                continue
            assert answer.outcome is Outcome.LATER and answer.retry_after_s is not None, answer
            n_retries[number] += 1
            wait_s = answer.retry_after_s * n_retries[number] * random.uniform(0.5, 1.0)
            heapq.heappush(due, (time.monotonic() + wait_s, number))
    finally:
        for channel in channels:
            channel.close()
    statement = "SELECT count(*), count(DISTINCT seq) FROM collectives WHERE cluster_id = 'many'"
    answer = httpx.post(
        attacked_alone.url("api", "/api/v1/sql"),
        json={"sql": statement},
        headers={"Authorization": bearer(attacked_alone.reader)},
        timeout=PATIENCE_S,
    )
    assert answer.json()["rows"] == [[N_AGENTS, N_AGENTS]]
