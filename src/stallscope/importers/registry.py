"""The list of importers, and which one a path is for."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from stallscope.errors import BadTrace, NotFound
from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Importer:
    """name: what the user reads. sniff: whether a path is of this kind, cheaply and without raising
    StallscopeError. read: its events; raises BadTrace, NotFound.
    """

    name: str
    sniff: Callable[[Path], bool]
    read: Callable[[Path], Trace]


def importers() -> list[Importer]:
    """Every importer of the package, by name."""
    import stallscope.importers as package

    modules = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return sorted(
        (module.IMPORTER for module in modules if hasattr(module, "IMPORTER")),
        key=lambda importer: importer.name,
    )


def importer_for(path: Path) -> Importer:
    """The importer for a path. Raises NotFound: no such path; BadTrace: of no known kind."""
    if not path.exists():
        raise NotFound(f"there is no {path}: check the path")
    found = [importer for importer in importers() if importer.sniff(path)]
    if not found:
        known = ", ".join(importer.name for importer in importers())
        raise BadTrace(f"{path} is none of the kinds that can be imported ({known}): check the path")
    return found[0]
