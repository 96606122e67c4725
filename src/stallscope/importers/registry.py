"""The list of importers, and the importer for a path."""

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from stallscope.errors import BadTrace, NotFound
from stallscope.events.layout import is_node_trace
from stallscope.events.trace import Trace
from stallscope.importers.rank_statements import Statements
from stallscope.importers.texts import Source, files_of, head_of

T = TypeVar("T")
Unread = list[tuple[Path, str]]
"""Files that cannot be read, each with the reason."""


@dataclass(frozen=True)
class Importer:
    """Reads one kind of file.

    name: as users read it. accepts: whether a file is of this kind, from its path and its first bytes; cheap, never
    raises. read_files: the events of files of this kind; adds to the list the files that it leaves out. collect: for
    logs and stacks instead of read_files, adds the statements of files. Both raise BadTrace.
    takes_folders: a folder as a whole is the input. is_general: other importers are asked first.
    """

    name: str
    accepts: Callable[[Path, bytes], bool]
    read_files: Callable[[Sequence[Path], Unread], Trace] | None = None
    collect: Callable[[Iterable[Path], Statements], None] | None = None
    takes_folders: bool = False
    is_general: bool = False

    def read(self, source: Source, unread: Unread | None = None) -> Trace:
        """The events of all files of this kind that a source holds.

        unread: damaged files are added to this list and left out; without it, a damaged file raises BadTrace.
        """
        files = [source] if self.takes_folders and isinstance(source, Path) else self.files(source)
        if not files:
            raise BadTrace(f"{source} contains no file of this kind ({self.name}): check the path")
        if self.read_files:
            damaged: Unread = []
            trace = self.read_files(files, damaged)
            if damaged and unread is None:
                raise BadTrace(" ".join(map(str, damaged[0])))
            if unread is not None:
                unread += damaged
            return trace
        from stallscope.importers.statement_trace import statement_trace

        statements = Statements()
        if self.collect:
            self.collect(files, statements)
        return statement_trace(statements)

    def files(self, source: Source) -> list[Path]:
        """The files of this kind."""
        return [file for file in files_of(source) if self.accepts(file, head_of(file))]

    def sniff(self, source: Source) -> bool:
        """Whether a source holds a file of this kind."""
        if self.takes_folders:
            return isinstance(source, Path) and source.is_dir() and self.accepts(source, b"")
        return any(self.accepts(file, head_of(file)) for file in files_of(source))


def each_readable(files: Sequence[Path], read: Callable[[Path], T], unread: Unread) -> list[T]:
    """The content of each file; damaged files are added to the list. Raises BadTrace if all are damaged."""
    contents: list[T] = []
    for file in files:
        try:
            contents.append(read(file))
        except BadTrace as error:
            if len(files) == 1:
                raise
            unread.append((file, str(error).removeprefix(f"{file} ").removeprefix(f"{file}: ")))
    if not contents:
        raise BadTrace(
            f"{files[0]} {unread[-len(files)][1]}; {len(files) - 1} more files cannot be read either"
        )
    return contents


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
        if any(is_node_trace(head_of(file)) for file in files_of(path)):
            merge = f"`stallscope merge {path}/*.db -o ALL.db`"
            return f"contains node traces: {merge}, then `stallscope explain --db ALL.db`"
        return "contains no file that can be imported: `stallscope import --help` lists the kinds"
    return remedy(path, head_of(path))
