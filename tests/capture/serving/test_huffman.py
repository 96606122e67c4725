"""The code of HTTP/2's header fields, on the examples of RFC 7541."""

import pytest

from stallscope.capture.serving.huffman import decoded


@pytest.mark.parametrize(
    ("data", "text"),  # appendix C.4 and C.6
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", "www.example.com"),
        ("25a849e95bb8e8b4bf", "custom-value"),
        ("d07abe941054d444a8200595040b8166e082a62d1bff", "Mon, 21 Oct 2013 20:13:21 GMT"),
        ("9d29ad171863c78f0b97c8e9ae82ae43d3", "https://www.example.com"),
    ],
)
def test_examples_of_the_specification(data, text):
    assert decoded(bytes.fromhex(data)) == text


def test_a_cut_text_ends_with_its_last_whole_letter():
    assert decoded(bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ff")[:3]) == "www"
