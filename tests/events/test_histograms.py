"""Histograms as text: accuracy, size, and sums."""

import json

import numpy as np
import pytest

from stallscope.events.histograms import histogram, joined, percentiles_ms, text_of


def test_an_edge_of_the_histogram_is_at_most_9_percent_above_each_length():
    lengths_ns = np.geomspace(1e5, 1e9, 500).astype(np.int64)
    counts = {int(edge): n for edge, n in json.loads(histogram(lengths_ns)).items()}
    assert sum(counts.values()) == 500
    for length_us in lengths_ns / 1e3:
        edge = min(each for each in counts if each >= length_us)
        assert edge <= 1.1 * length_us + 1


def test_the_text_of_a_wide_histogram_fits_its_column():
    assert len(histogram(np.geomspace(1e3, 1e12, 100_000).astype(np.int64))) <= 2048


def test_the_sum_of_histograms_is_the_histogram_of_all_lengths():
    lengths_ns = np.geomspace(1e5, 1e9, 400).astype(np.int64)
    both = joined([histogram(lengths_ns[::2]), histogram(lengths_ns[1::2]), None])
    assert json.loads(text_of(both)) == json.loads(histogram(lengths_ns))


def test_percentiles_are_at_most_9_percent_too_large():
    lengths_ns = np.linspace(1e6, 1e9, 1000).astype(np.int64)
    numbers = percentiles_ms(joined([histogram(lengths_ns)]))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact_ms = np.quantile(lengths_ns, share) / 1e6
        assert exact_ms * 0.99 <= numbers[name] <= exact_ms * 1.1
    assert percentiles_ms(joined([])) == {}
    assert numbers["p99.9"] == pytest.approx(1000, rel=0.1)
