"""The price of a GPU hour: matching rates, and invalid files of rates."""

import math
import re

import pytest

from stallscope import rates
from stallscope.errors import BadInput, NotFound

FILE = {
    "as_of": "2026-01-31",
    "providers": {"aws": ["ec2", "Amazon Web Services"]},
    "rates": {
        "aws": {"H100": 7.0, "A100": 4.0, "A100 80GB": 5.0},
        "cellar": {"H100": 1.5},
        "any": {"H100": 6.0, "T4": 0.5},
    },
}


@pytest.fixture
def table():
    return rates.validated(FILE, "mine.yaml")


def price(table, gpu, provider=None):
    listed_rate = rates.lookup(table, gpu=gpu, provider=provider)
    return listed_rate and (listed_rate.rate.usd_per_hour, listed_rate.how)


@pytest.mark.parametrize("provider", ["aws", "AWS", "ec2", "amazon-web-services", " EC2 "])
def test_a_provider_is_known_by_all_its_names(table, provider):
    assert price(table, "NVIDIA H100 80GB HBM3", provider) == (7.0, "provider")


def test_a_provider_without_aliases_is_known_by_its_own_name(table):
    assert price(table, "H100", "Cellar") == (1.5, "provider")


def test_the_model_with_most_fitting_words_is_taken(table):
    assert price(table, "NVIDIA A100-SXM4-80GB", "aws") == (5.0, "provider")
    assert price(table, "NVIDIA A100-SXM4-40GB", "aws") == (4.0, "provider")


def test_an_unknown_provider_uses_the_fallback_price(table):
    assert price(table, "NVIDIA H100 80GB HBM3", "nobody") == (6.0, "fallback")
    assert price(table, "NVIDIA H100 80GB HBM3") == (6.0, "fallback")
    assert price(table, "Tesla T4", "aws") == (0.5, "fallback")


@pytest.mark.parametrize(
    "gpu", [None, "", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H1000"]
)
def test_a_price_that_is_not_in_the_table_is_unknown(table, gpu):
    assert rates.lookup(table, gpu=gpu, provider="aws") is None


@pytest.mark.parametrize("usd", [0, -1, math.nan, math.inf, 1e6, "7", None, True])
def test_an_invalid_price_is_refused_with_its_location(usd):
    with pytest.raises(BadInput, match=r"mine\.yaml: rates: aws: H100: .* is not a price"):
        rates.validated({**FILE, "rates": {"aws": {"H100": usd}}}, "mine.yaml")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"price": 1}, "unknown key 'price'"),
        ({"as_of": "lately"}, "as_of: 'lately' is not a date"),
        ({"as_of": None}, "as_of: None is not a date"),
        ({"providers": {"aws": "ec2"}}, "providers: aws: must be a list"),
        ({"providers": {"aws": ["cloud"], "gcp": ["Cloud"]}}, "'Cloud' is a name of both aws and gcp"),
        ({"providers": ["aws"]}, "providers: must be a mapping"),
        ({"rates": {}}, "rates: no price"),
        ({"rates": {"aws": 7}}, "aws: must map GPU models"),
        ({"rates": {"aws": {"H100": 7}, "ec2": {"h100": 8}}}, "already have a price"),
        ({"rates": {"aws": {"--": 7}}}, "a GPU model is a name"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(change, expected):
    with pytest.raises(BadInput, match=expected):
        rates.validated({**FILE, **change}, "mine.yaml")


def test_the_shipped_table_is_valid_and_has_a_day():
    table = rates.load()
    assert table.as_of >= "2025"
    assert price(table, "NVIDIA H100 80GB HBM3", "ec2")[1] == "provider"
    assert {rate.provider for rate in table.rates} >= {"aws", "gcp", "azure", rates.ANY}


def test_missing_and_malformed_rate_files_are_errors(tmp_path):
    with pytest.raises(NotFound, match="the price file does not exist"):
        rates.load(tmp_path / "absent.yaml")
    for content in ("[1, 2]", "a: [", "\x00"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(BadInput, match=r"bad\.yaml"):
            rates.load(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match="cannot be read"):
        rates.load(tmp_path / "bad.yaml")


def test_every_shipped_price_states_its_source():
    lines = rates.SHIPPED.read_text().split("\nrates:\n")[1].split("\n  any:")[0].splitlines()
    prices = [line for line in lines if line.startswith("    ")]
    assert len(prices) > 40
    wanted = re.compile(r"#  ?(memory|as \S+|\d{4}-\d\d-\d\d, [A-D])")
    assert not [line for line in prices if not wanted.search(line)]
