"""Attaches probes to the functions of files that discovery found.

If a function starts with endbr64, its probe is placed after that instruction, so the kernel need not single-step: the
stack is the same there. Notes for the user list probes that are expensive, and files that could not be attached to.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.discovery import Discovery, Library, functions
from stallscope.capture.probes.elf import Entry, FileKey, NotElf, Symbol
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.operations import Hook
from stallscope.events.kernel import HookGroup


class Closable(Protocol):
    """The result of an attach: probes that can be detached."""

    def close(self) -> None:
        """Detach."""


class ProbeSwitch(Protocol):
    """Switches the probes of some groups on and off: governor.Governor."""

    def add(self, key: FileKey, path: str, hooks: Mapping[HookGroup, Sequence[Hook]]) -> None:
        """Probes of a file, by group. Raises KernelRefused."""

    def remove(self, key: FileKey) -> None:
        """The file is no longer used."""


Attach = Callable[[str, Sequence[Hook]], Closable]
"""attach(path, hooks): the method of a loaded Program. Raises KernelRefused."""

_ENDBR_BYTES = 4


@dataclass
class Attacher:
    """Attaches probes to new files, and detaches from files that no process uses any more: a probe keeps the file on
    disk.
    """

    discovery: Discovery
    attach: Attach
    proc: Path = Path("/proc")
    launches: bool = False
    essential_only: bool = False  # for kernels where probes are slow to detach
    governor: ProbeSwitch | None = None
    _links: dict[FileKey, Closable] = field(default_factory=dict)

    def attach_new(self, now_ns: int) -> list[str]:
        """Attach to the files found since the last scan. Returns notes for the user, one line each.

        If the process of a file has ended before the attach, the file will be found again in the next process that maps
        it.
        """
        notes = []
        for library in self.discovery.scan(now_ns):
            try:
                notes += self._attach_library(library)
            except (OSError, NotElf, KernelRefused) as error:
                if (self.proc / str(library.pid)).exists():
                    notes.append(f"calls of {library.name} are not traced: {error}")
                else:
                    self.discovery.forget(library.key)
        return notes

    def drop_unused(self, now_ns: int) -> int:
        """Detach from files that have long been unused; to be called from time to time. Returns their number."""
        unused = self.discovery.unused(now_ns)
        for key in unused:
            if key in self._links:
                self._links.pop(key).close()
            if self.governor:
                self.governor.remove(key)
            self.discovery.forget(key)
        return len(unused)

    def _attach_library(self, library: Library) -> list[str]:
        with elf.open_image(library.path) as image:
            if image.key != library.key:
                raise NotElf("the file was replaced while it was read")
            governed = operations.GOVERNED if self.governor else ()
            always = (HookGroup.ALWAYS,) if self.governor else operations.ALWAYS
            function_names = operations.names(launches=self.launches, groups=(*always, *governed))
            symbols = functions(image, function_names, is_static=library.is_static)
            entries = {name: elf.probe_entry(image, symbol) for name, symbol in symbols.items()}
            offsets = probe_offsets(symbols, entries)
            by_group = {
                group: operations.hooks(offsets, launches=self.launches, groups=(group,))
                for group in governed
            }
            hooks = operations.hooks(offsets, launches=self.launches, groups=always)
            if self.essential_only:
                hooks = operations.essential_hooks(hooks)
                by_group = {
                    group: operations.essential_hooks(group_hooks) for group, group_hooks in by_group.items()
                }
            n_hooks = len(hooks) + sum(map(len, by_group.values()))
            if not n_hooks:
                return [f"{library.name} has none of the functions to trace: another version, or stripped"]
            if hooks:
                self._links[library.key] = self.attach(image.path, hooks)
            if self.governor and any(by_group.values()):
                self.governor.add(library.key, image.path, by_group)
        return [
            f"attached to {n_hooks} functions of {library.name}",
            *_expensive_probe_notes(library, entries),
        ]


def probe_offsets(symbols: Mapping[str, Symbol], entries: Mapping[str, Entry]) -> dict[str, int]:
    """File offset of each function's probe: after an endbr64, otherwise its first instruction."""
    return {
        name: symbol.offset + _ENDBR_BYTES if entries[name] is Entry.AFTER_ENDBR else symbol.offset
        for name, symbol in symbols.items()
    }


def _expensive_probe_notes(library: Library, entries: Mapping[str, Entry]) -> list[str]:
    n = Counter(entries.values())[Entry.STEPPED]
    if not n:
        return []
    return [f"{n} functions of {library.name} start with an instruction that makes a probe cost about 5 us"]
