"""Where a store's sealed files are kept: in its folder, or also in a bucket that several hubs share."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from stallscope.store.hub.damage import reason_unreadable, reason_unreadable_inside
from stallscope.store.hub.journal import Segment
from stallscope.store.hub.segments import remove_orphans


class SegmentFiles(Protocol):
    """The sealed files of one store. Thread-safe."""

    @property
    def folder(self) -> Path:
        """The local folder; the paths of segments are relative to it."""

    @property
    def prefix(self) -> str:
        """Prefix of the name of each new file."""

    def opened(self, known: Sequence[Segment], *, latest_us: int) -> list[Path]:
        """Called at the start, with the files that the journal lists and its newest commit.

        Returns files that are newer than the list.
        """

    def is_away(self) -> bool:
        """Whether new files cannot be kept now, so that writing them is useless."""

    def put(self, segment: Segment) -> None:
        """Keep a new local file; called before the journal lists it. Raises StorageFailed."""

    def fetch(self, segments: Sequence[Segment]) -> None:
        """Make files readable in the folder. Raises StorageFailed."""

    def remove(self, segment: Segment) -> None:
        """Delete a file that the journal no longer lists."""

    def reason_unreadable(self, segment: Segment) -> str:
        """Why a file must be damaged, without reading it; "" if it may be intact."""

    def reason_unreadable_inside(self, segment: Segment) -> str:
        """Why a file is damaged, after reading every row; "" if it is intact."""


class FolderFiles:
    """Sealed files in a folder that only this store uses."""

    prefix = ""

    def __init__(self, folder: Path):
        self.folder = folder

    def opened(self, known: Sequence[Segment], *, latest_us: int) -> list[Path]:
        """Remove unlisted files, except files that are newer than the list."""
        return remove_orphans(self.folder, known, latest_us=latest_us)

    def is_away(self) -> bool:
        """Never: a failed write is reported and repeated."""
        return False

    def put(self, segment: Segment) -> None:
        """Do nothing: the file is synced in its folder."""

    def fetch(self, segments: Sequence[Segment]) -> None:
        """Do nothing: all files are in the folder."""

    def remove(self, segment: Segment) -> None:
        """Delete a file."""
        with suppress(OSError):
            (self.folder / segment.path).unlink(missing_ok=True)

    def reason_unreadable(self, segment: Segment) -> str:
        """By its size, header and footer."""
        return reason_unreadable(self.folder, segment)

    def reason_unreadable_inside(self, segment: Segment) -> str:
        """After reading every row."""
        return reason_unreadable_inside(self.folder, segment)
