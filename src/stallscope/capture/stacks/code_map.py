"""The mapped code of a process: file and function of an address, and the rules to unwind to the caller.

    files = Files()                        # of all processes: cached facts by file; no file is held open
    code = MappedCode(pid, files)
    code.name(address)                     # "cudaStreamSynchronize+0x3d (libcudart.so.12)"
    code.rules(address)                    # eh_frame.Rules

Files are opened through map_files, which leads to the mapped file itself, even if it has been renamed or replaced.
Where that is not allowed, a file is opened by name, and used only if it is still the mapped file.
"""

import bisect
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import FileKey, Image, NotElf
from stallscope.capture.stacks.eh_frame import NoRules, Rules, rules_at
from stallscope.capture.stacks.interpreter import Region, regions
from stallscope.capture.stacks.symbols import Functions, function_at, functions_of

_MAX_FILES = 64
_MAX_FUNCTIONS = 1_500_000
"""Of all files together, 20 bytes each; the least recently used files are dropped."""
_MAX_ADDRESSES = 16384
_PYTHON = re.compile(r"/(?:lib)?python3?[0-9.]*[a-z]*(?:\.so[0-9.]*)?$")


@dataclass
class _FileFacts:
    """Cached facts about a file. None for an address: the file has no rules for it."""

    functions: Functions | None = None
    names: dict[int, str] = field(default_factory=dict)
    rules: dict[int, Rules | None] = field(default_factory=dict)


@dataclass
class Files:
    """Cached facts about files, by file."""

    _facts: OrderedDict[FileKey, _FileFacts] = field(default_factory=OrderedDict)

    def facts(self, key: FileKey) -> _FileFacts:
        """The cache entry of a file, to be filled."""
        if key not in self._facts:
            self._facts[key] = _FileFacts()
        self._facts.move_to_end(key)
        while len(self._facts) > 1 and (
            len(self._facts) > _MAX_FILES or self._n_functions() > _MAX_FUNCTIONS
        ):
            self._facts.popitem(last=False)
        return self._facts[key]

    def _n_functions(self) -> int:
        return sum(len(facts.functions.begins) for facts in self._facts.values() if facts.functions)


class MappedCode:
    """The code of one process, according to the last reading of its maps."""

    def __init__(self, pid: int, files: Files, proc: Path = Path("/proc")):
        self.pid = pid
        self._files, self._proc = files, proc
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._keys: dict[Region, FileKey | None] = {}

    def refresh(self) -> None:
        """Read the mappings again."""
        self._regions = [region for region in regions(self.pid, self._proc) if region.is_code]
        self._starts = [region.start for region in self._regions]
        current = set(self._regions)
        self._keys = {region: key for region, key in self._keys.items() if region in current}

    def region(self, address: int) -> Region | None:
        """The region of a file's code that holds an address."""
        i = bisect.bisect_right(self._starts, address) - 1
        return self._regions[i] if i >= 0 and address < self._regions[i].end else None

    def is_interpreter(self, address: int) -> bool:
        """Whether the address is in Python's own code, by the name of the file."""
        region = self.region(address)
        return region is not None and _PYTHON.search(region.name.removesuffix(" (deleted)")) is not None

    def name(self, address: int) -> str:
        """The function, the offset in it, and the library; only the offset if the function has no name."""
        region = self.region(address)
        if region is None:
            return f"{address:#x}"
        file_offset = address - region.start + region.offset
        facts = self._facts(region)
        if facts is None:
            return f"{file_offset:#x} ({_short(region.name)})"
        if file_offset not in facts.names:
            if len(facts.names) >= _MAX_ADDRESSES:
                facts.names.clear()
            facts.names[file_offset] = self._function_name(region, facts, file_offset)
        return f"{facts.names[file_offset]} ({_short(region.name)})"

    def rules(self, address: int) -> Rules:
        """The rules to unwind from the instruction at an address to its caller. Raises NoRules."""
        region = self.region(address)
        facts = self._facts(region) if region else None
        if region is None or facts is None:
            raise NoRules(f"no readable file is mapped at {address:#x}")
        file_offset = address - region.start + region.offset
        if file_offset not in facts.rules:
            if len(facts.rules) >= _MAX_ADDRESSES:
                facts.rules.clear()
            facts.rules[file_offset] = self._rules(region, file_offset)
        rules = facts.rules[file_offset]
        if rules is None:
            raise NoRules(f"{_short(region.name)} has no unwind rules for {file_offset:#x}")
        return rules

    def _facts(self, region: Region) -> _FileFacts | None:
        if region not in self._keys:
            try:
                with self._open_image(region) as image:
                    self._keys[region] = image.key
            except (OSError, NotElf):
                self._keys[region] = None
        key = self._keys[region]
        return self._files.facts(key) if key else None

    def _function_name(self, region: Region, facts: _FileFacts, file_offset: int) -> str:
        try:
            with self._open_image(region) as image:
                if facts.functions is None:
                    facts.functions = functions_of(image)
                function = function_at(image, facts.functions, elf.address_of(image, file_offset))
        except (OSError, NotElf):
            function = None
        return f"{function.name}+{function.offset:#x}" if function else f"{file_offset:#x}"

    def _rules(self, region: Region, file_offset: int) -> Rules | None:
        try:
            with self._open_image(region) as image:
                return rules_at(image, elf.address_of(image, file_offset))
        except (OSError, NotElf, NoRules):
            return None

    @contextmanager
    def _open_image(self, region: Region) -> Iterator[Image]:
        """The mapped file. Raises OSError, NotElf."""
        process_dir = self._proc / str(self.pid)
        with ExitStack() as stack:
            try:
                by_address = process_dir / "map_files" / f"{region.start:x}-{region.end:x}"
                image = stack.enter_context(elf.open_image(by_address))
            except OSError:
                image = stack.enter_context(elf.open_image(process_dir / "root" / region.name.lstrip("/")))
                if image.key.inode != region.inode:
                    raise FileNotFoundError(region.name) from None
            yield image


def _short(name: str) -> str:
    return name.removesuffix(" (deleted)").rpartition("/")[2]
