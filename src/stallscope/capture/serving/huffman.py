"""Decodes the text of HTTP/2 header fields (RFC 7541, appendix B).

The code is canonical: within a length, codes are consecutive in the order of the letters. Letters with longer codes do
not occur in paths; the text ends before them.
"""

from collections.abc import Iterator

_LETTERS = {
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
    10: '!"()?',
    11: "'+|",
    12: "#>",
    13: "\0$@[]~",
    14: "^}",
    15: "<`{",
}


def _codes() -> Iterator[tuple[tuple[int, int], str]]:
    code, before = 0, min(_LETTERS)
    for n_bits, letters in _LETTERS.items():
        code <<= n_bits - before
        before = n_bits
        for letter in letters:
            yield (n_bits, code), letter
            code += 1


_BY_CODE = dict(_codes())


def decoded(data: bytes) -> str:
    """The text; the bits after the last letter are ignored, as data may be cut."""
    out, code, n_bits = [], 0, 0
    for bit in (byte >> shift & 1 for byte in data for shift in range(7, -1, -1)):
        code, n_bits = code << 1 | bit, n_bits + 1
        if letter := _BY_CODE.get((n_bits, code)):
            out.append(letter)
            code = n_bits = 0
    return "".join(out)
