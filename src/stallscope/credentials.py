"""Secrets: read from files and the environment, checked before a header carries them, masked in every message.

A refusal names the source of a secret, never its text. `masked` is for texts that other programs and libraries wrote.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

ANY_TOKEN = re.compile(r"[!-~]{16,}")
"""A bearer token. Collectors may use tokens in their own format."""

_MASKS = (
    (re.compile(r"(sst_[0-9a-f]{12}_)[A-Za-z0-9_-]+"), r"\1***"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"), "***"),  # JSON Web Token
    (re.compile(r"(?i)\b(bearer\s+|authorization:\s*basic\s+)(?!sst_)[\w.~+/=\\-]{8,}"), r"\1***"),
    (re.compile(r"(://[^\s'\"/@:]*:)[^\s'\"]*@"), r"\1***@"),  # user and password of a URL
    (re.compile(r"(?<![\w/.@:-])([\w.-]+:)(?!//)[^\s'\"/@]+@(?=[\w\[])"), r"\1***@"),
    (
        re.compile(r"(?i)([?&;\s-][\w.-]*(?:token|secret|password|passwd|api[_-]?key|signature)=)[^\s&'\"]+"),
        r"\1***",
    ),
)
_LIKE_A_TOKEN = re.compile(r"(?=.*\d)[\w+=-]{20,}")
"""A token that was given in place of the path of its file."""


def masked(text: str) -> str:
    """The text without tokens, passwords of URLs, and values of secret parameters."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def shown_path(path: Path) -> str:
    """The path of a file of secrets, for a message; masked if it may be the secret itself."""
    return "the given text (a token?)" if _LIKE_A_TOKEN.fullmatch(str(path)) else masked(str(path))


def from_environment(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The secret in an environment variable; empty without the variable. Raises ValueError without the secret."""
    return header_value((os.environ if environ is None else environ).get(name, "").strip(), name)


def header_value(text: str, source: str) -> str:
    """The text, if an HTTP header can carry it. Raises ValueError that names only the source."""
    if not all("!" <= character <= "~" or character in " \t" for character in text):
        raise ValueError(
            f"{source} must contain a single line of printable ASCII, because an HTTP header carries it"
        )
    return text
