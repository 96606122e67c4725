"""The memory of the messages in a request, counted before decoding."""

from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from stallscope.receive import message_sizes
from stallscope.receive.cumulative_counters import Series, digest

from .requests import add_logs, logs, numbers, spans

LIMIT = 1 << 20
MANY = {f"k{number}": True for number in range(20_000)}


def exponential_histogram() -> Any:
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    metric.exponential_histogram.data_points.add().positive.bucket_counts.extend([1] * 300_000)
    return message


def many_resources() -> Any:
    message = logs([])
    for _ in range(2_000):
        add_logs(message, [{}])
    return message


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ("logs", logs([{"attributes": MANY}])),
        ("logs", logs([{"attributes": {"list": [True] * 20_000}}])),
        ("logs", logs([{"body": MANY}])),
        ("logs", logs([{}], resource=MANY)),
        ("logs", many_resources()),
        ("traces", spans([{"attributes": MANY}])),
        ("traces", spans([{"events": [{"name": "e"}] * 20_000}])),
        ("metrics", numbers([{"as_double": 1.0, "attributes": MANY}])),
        ("metrics", exponential_histogram()),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_many_small_messages_exceed_the_limit(signal: str, message: Any):
    body = message.SerializeToString()
    assert len(body) < LIMIT
    assert message_sizes.exceeds(signal, body, LIMIT)
    assert not message_sizes.exceeds(signal, body, 100 * LIMIT)


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ("logs", logs([{"body": "2\n" * 500_000}])),
        ("logs", logs([{"attributes": {"k": "2" * 900_000}}])),
        ("traces", spans([{"name": "x" * 900_000}])),
        ("metrics", numbers([{"as_double": 1.0, "attributes": {"k": "\n" * 900_000}}])),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_long_texts_do_not_count_as_messages(signal: str, message: Any):
    assert not message_sizes.exceeds(signal, message.SerializeToString(), LIMIT)


def test_an_invalid_body_is_left_to_the_decoder():
    for body in (b"\xff" * 100, b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 100, b""):
        for signal in ("logs", "traces", "metrics"):
            assert not message_sizes.exceeds(signal, body, LIMIT)


def test_the_series_of_one_tenant_do_not_evict_another_tenants_series():
    series = Series(most=10)

    def growth(tenant: str, name: str, value: float, ts_ns: int) -> float | None:
        key = digest(name)
        return series.growth(tenant, key, ts_ns=ts_ns, start_ns=0, value=value, is_monotonic=True).increase

    assert growth("honest", "m", 1.0, 1) is None
    for number in range(100):
        growth("attacker", f"m{number}", 1.0, 1)
    assert growth("honest", "m", 3.0, 2) == 2.0
    assert growth("attacker", "m0", 3.0, 2) is None
