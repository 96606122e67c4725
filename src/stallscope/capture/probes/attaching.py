"""From a file that discovery found to hooks on its functions.

A function that starts with endbr64 is hooked after it, where the kernel need not single-step: the stack is
the same there. What makes hooks dear, and what could not be attached to, is said in a note for the user.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.discovery import Discovery, Library, functions
from stallscope.capture.probes.elf import Entry, FileKey, NotElf, Symbol
from stallscope.capture.probes.libbpf import Refused
from stallscope.capture.probes.operations import Hook
from stallscope.events.kernel import HookGroup


class Closable(Protocol):
    """What an attach gives: hooks that can be taken off."""

    def close(self) -> None:
        """Detach."""


class Governing(Protocol):
    """Who sets the hooks of some groups, and takes them off: governor.Governor."""

    def add(self, key: FileKey, path: str, hooks: Mapping[HookGroup, Sequence[Hook]]) -> None:
        """Hooks of a file, by group. Raises Refused."""

    def remove(self, key: FileKey) -> None:
        """The file is no longer used."""


Attach = Callable[[str, Sequence[Hook]], Closable]
"""attach(path, hooks): that of a loaded Program. Raises Refused."""

_ENDBR_BYTES = 4


@dataclass
class Attaching:
    """Hooks what is found, and takes the hooks off files that nobody uses any more: they hold the file on disk."""

    discovery: Discovery
    attach: Attach
    proc: Path = Path("/proc")
    launches: bool = False
    only_few: bool = False  # hooks are slow to be taken off
    governor: Governing | None = None
    _links: dict[FileKey, Closable] = field(default_factory=dict)

    def new(self, now_ns: int) -> list[str]:
        """Attach to what was found since the last look. Returns notes for the user, one line each.

        A file whose process has ended meanwhile will be found again with the next one that has it.
        """
        notes = []
        for library in self.discovery.scan(now_ns):
            try:
                notes += self._attached(library)
            except (OSError, NotElf, Refused) as error:
                if (self.proc / str(library.pid)).exists():
                    notes.append(f"its calls are not seen: {library.name}: {error}")
                else:
                    self.discovery.forget(library.key)
        return notes

    def drop_unused(self, now_ns: int) -> int:
        """Detach from files that have long been unused; call it now and then. Returns how many."""
        unused = self.discovery.unused(now_ns)
        for key in unused:
            if key in self._links:
                self._links.pop(key).close()
            if self.governor:
                self.governor.remove(key)
            self.discovery.forget(key)
        return len(unused)

    def _attached(self, library: Library) -> list[str]:
        with elf.opened(library.path) as image:
            if image.key != library.key:
                raise NotElf("the file was replaced while it was being looked at")
            governed = operations.GOVERNED if self.governor else ()
            always = (HookGroup.ALWAYS,) if self.governor else operations.ALWAYS
            wanted = operations.names(launches=self.launches, groups=(*always, *governed))
            found = functions(image, wanted, is_static=library.is_static)
            entries = {name: elf.entry(image, symbol) for name, symbol in found.items()}
            places = hooked_at(found, entries)
            by_group = {
                group: operations.hooks(places, launches=self.launches, groups=(group,)) for group in governed
            }
            hooks = operations.hooks(places, launches=self.launches, groups=always)
            if self.only_few:
                hooks = operations.few(hooks)
                by_group = {group: operations.few(each) for group, each in by_group.items()}
            n_hooks = len(hooks) + sum(map(len, by_group.values()))
            if not n_hooks:
                return [f"{library.name} has none of the functions to trace: another version, or stripped"]
            if hooks:
                self._links[library.key] = self.attach(image.path, hooks)
            if self.governor and any(by_group.values()):
                self.governor.add(library.key, image.path, by_group)
        return [f"attached to {n_hooks} functions of {library.name}", *_dear(library, entries)]


def hooked_at(found: Mapping[str, Symbol], entries: Mapping[str, Entry]) -> dict[str, int]:
    """Offset in the file at which to hook each function: past an endbr64, else its first instruction."""
    return {
        name: symbol.offset + _ENDBR_BYTES if entries[name] is Entry.AFTER_ENDBR else symbol.offset
        for name, symbol in found.items()
    }


def _dear(library: Library, entries: Mapping[str, Entry]) -> list[str]:
    n = Counter(entries.values())[Entry.STEPPED]
    if not n:
        return []
    return [f"{n} functions of {library.name} start with an instruction that makes a hook cost about 5 us"]
