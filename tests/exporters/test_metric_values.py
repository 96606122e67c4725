"""Values of metrics: growing values and bounded values."""

import math

import numpy as np
import pytest

from stallscope.exporters import metric_table
from stallscope.exporters.metric_table import (
    COLLECTIVE_CALLS,
    COLLECTIVE_WAIT,
    GPU_UTILIZATION,
    METRICS,
    Kind,
)
from stallscope.exporters.metric_values import MAX_SERIES, Meter


def only(meter: Meter):
    ((_, series),) = meter.read()
    return series


def test_a_counter_adds_up_and_never_shrinks():
    meter = Meter(0)
    meter.add(COLLECTIVE_CALLS, 2, "0", "all_reduce")
    meter.add(COLLECTIVE_CALLS, 3, "0", "all_reduce")
    assert [entry.number for entry in only(meter)] == [5]
    with pytest.raises(ValueError, match="cannot decrease"):
        meter.add(COLLECTIVE_CALLS, -1, "0", "all_reduce")


def test_non_finite_values_are_dropped():
    meter = Meter(0)
    meter.add(COLLECTIVE_CALLS, math.nan, "0", "all_reduce")
    meter.set(GPU_UTILIZATION, math.inf, "id", "name", "NVIDIA")
    meter.observe(COLLECTIVE_WAIT, np.array([math.nan, math.inf]), "0")
    assert not any(series for _, series in meter.read())


def test_series_beyond_the_limit_share_an_overflow_series():
    meter = Meter(0)
    for i in range(MAX_SERIES + 50):
        meter.add(COLLECTIVE_CALLS, 1, str(i), "all_reduce")
    series = only(meter)
    assert len(series) == MAX_SERIES + 1
    assert [entry.number for entry in series if entry.values is None] == [50]


def test_values_on_a_bound_belong_to_its_bucket():
    meter = Meter(0)
    bounds = COLLECTIVE_WAIT.bounds
    meter.observe(COLLECTIVE_WAIT, np.array([bounds[0], bounds[0] * 1.01, bounds[-1] * 2]), "0")
    (verdict,) = only(meter)
    assert verdict.histogram.counts == [1, 1, *[0] * (len(bounds) - 2), 1]
    assert verdict.histogram.total == pytest.approx(bounds[0] * 2.01 + bounds[-1] * 2)


def test_the_table_is_sound():
    assert (
        len({metric.name for metric in METRICS}) == len({m.prometheus_name for m in METRICS}) == len(METRICS)
    )
    for metric in METRICS:
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert metric.meaning
        assert metric.prometheus_name.endswith("_total") == (metric.kind is Kind.COUNTER)
    listed = {var for var in vars(metric_table).values() if isinstance(var, metric_table.Metric)}
    assert listed == set(METRICS)


def test_names_that_claim_to_be_standard_are():
    hw = pytest.importorskip("opentelemetry.semconv._incubating.metrics.hw_metrics")
    system = pytest.importorskip("opentelemetry.semconv._incubating.metrics.system_metrics")
    standard = {value for module in (hw, system) for value in vars(module).values() if isinstance(value, str)}
    for metric in METRICS:
        if metric.name.startswith(("hw.", "system.")):
            assert metric.name in standard
