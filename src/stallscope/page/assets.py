"""The built files of the page, which npm makes from the folder web/ of the repository, and the headers they need."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from stallscope.errors import NotFound

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FOLDER = "built"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


@dataclass(frozen=True)
class Asset:
    """One file. is_named_by_content: its name changes with its content, so that browsers may keep it."""

    content: bytes
    media_type: str
    is_named_by_content: bool


def index() -> bytes:
    """The HTML of the page. Raises NotFound where the page was not built."""
    return _file("index.html").read_bytes()


def asset(name: str) -> Asset:
    """A script, a style sheet, the icon, or the licences. Raises NotFound."""
    ending = name[name.rfind(".") :]
    if "/" in name or ending not in _TYPES:
        raise NotFound(f"the page has no file {name[:80]!r}")
    is_hashed = name.count("-") > 0 and ending in (".js", ".css")
    return Asset(_file("assets", name).read_bytes(), _TYPES[ending], is_hashed)


def script_and_style() -> tuple[str, str]:
    """The whole script and style sheet of the page, for a snapshot. Raises NotFound."""
    folder = _file("assets")
    texts = {entry.name[entry.name.rfind(".") :]: entry.read_text() for entry in folder.iterdir()}
    return texts[".js"], texts[".css"]


def _file(*names: str) -> Traversable:
    path = files("stallscope.page").joinpath(_FOLDER, *names)
    if not path.is_file() and not path.is_dir():
        raise NotFound("the page is not part of this installation; build it with `make page`")
    return path
