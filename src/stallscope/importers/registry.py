"""The list of importers, and the importer for a path."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from stallscope.errors import BadTrace, NotFound
from stallscope.events.trace import Trace
from stallscope.importers.texts import Source, files_of, head_of


@dataclass(frozen=True)
class Importer:
    """Reads one kind of file.

    name: as users read it. accepts: whether a file is of this kind, from its path and its first bytes; cheap, never
    raises. read: the events of all files of this kind that a source holds; raises BadTrace, NotFound.
    takes_folders: a folder as a whole is the input. is_general: other importers are asked first.
    """

    name: str
    accepts: Callable[[Path, bytes], bool]
    read: Callable[[Source], Trace]
    takes_folders: bool = False
    is_general: bool = False

    def sniff(self, source: Source) -> bool:
        """Whether a source holds a file of this kind."""
        if self.takes_folders:
            return isinstance(source, Path) and source.is_dir() and self.accepts(source, b"")
        return any(self.accepts(file, head_of(file)) for file in files_of(source))


@cache
def importers() -> list[Importer]:
    """Every importer of the package, by name; general ones last."""
    import stallscope.importers as package

    modules = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return sorted(
        (module.IMPORTER for module in modules if hasattr(module, "IMPORTER")),
        key=lambda importer: (importer.is_general, importer.name),
    )


def importer_for(path: Path) -> Importer:
    """The importer for a path. Raises NotFound: no such path; BadTrace: of no known kind."""
    if not path.exists():
        raise NotFound(f"{path} does not exist: check the path")
    for importer in importers():
        if importer.sniff(path):
            return importer
    raise BadTrace(f"{path} {why_unknown(path)}")


def why_unknown(path: Path) -> str:
    """The reason why no importer accepts a path, with the way to a readable file if the other tool has one."""
    from stallscope.importers.unreadable import remedy

    if path.is_dir():
        return "holds no file of a kind that can be imported: `stallscope import --help` lists the kinds"
    return remedy(path, head_of(path))
