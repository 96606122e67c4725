"""A place where a store can be opened, with each journal: a file in a folder, or a slot of PostgreSQL and a bucket."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.shared_servers import PostgresServer, S3Server

from stallscope.store.hub import schema
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.questions import Questions
from stallscope.store.hub.store import HubStore
from stallscope.store.shared import postgres_schema
from stallscope.store.shared.bucket import Bucket
from stallscope.store.shared.leases import Leases, Member
from stallscope.store.shared.postgres import Postgres
from stallscope.store.shared.postgres_journal import Lease, PostgresJournal
from stallscope.store.shared.segment_cache import SegmentCache, SlotFiles

from .rows import STILL

_EMPTIED = ("journal", "batches", "segments", "dropped", "round_medians", *schema.KEPT)


@dataclass(frozen=True)
class FolderPlace:
    """A store in a folder, with its journal in a file."""

    folder: Path

    def open(self, limits: Limits = STILL) -> HubStore:
        return HubStore.open(self.folder, limits)

    def opening(self, limits: str) -> str:
        """Code that opens the store in another process."""
        return (
            "from pathlib import Path\nfrom stallscope.store.hub.limits import Limits\n"
            "from stallscope.store.hub.store import HubStore\n"
            f"store = HubStore.open(Path({str(self.folder)!r}), Limits({limits}))\n"
        )


@dataclass(frozen=True)
class SlotPlace:
    """A store of a slot: its journal in PostgreSQL, its sealed files in a bucket."""

    folder: Path
    dsn: str
    postgres: Postgres
    bucket: str
    lease: Lease
    stack: ExitStack

    def open(self, limits: Limits = STILL) -> HubStore:
        bucket = Bucket(self.bucket)
        cache = self.stack.enter_context(closing(SegmentCache(self.folder, bucket, max_bytes=1 << 30)))
        questions = self.stack.enter_context(closing(Questions(self.folder, limits)))
        return HubStore(
            PostgresJournal(self.postgres, self.lease, bucket, lost=lambda: None),
            limits,
            files=SlotFiles(cache, slot=self.lease.slot, epoch=self.lease.epoch),
            questions=questions,
        )

    def opening(self, limits: str) -> str:
        """Code that opens the store in another process."""
        lease = self.lease
        return (
            "from contextlib import ExitStack\nfrom pathlib import Path\n"
            "from tests.store.hub.conftest import SlotPlace\nfrom stallscope.store.hub.limits import Limits\n"
            "from stallscope.store.shared.postgres import Postgres\n"
            "from stallscope.store.shared.postgres_journal import Lease\n"
            f"postgres = Postgres({self.dsn!r}, name={lease.owner!r})\n"
            f"lease = Lease({lease.slot}, {lease.owner!r}, {lease.epoch})\n"
            f"folder, dsn, bucket = Path({str(self.folder)!r}), {self.dsn!r}, {self.bucket!r}\n"
            "place = SlotPlace(folder, dsn, postgres, bucket, lease, ExitStack())\n"
            f"store = place.open(Limits({limits}))\n"
        )


Place = FolderPlace | SlotPlace


@pytest.fixture(scope="session")
def slot_database(postgres_server: PostgresServer) -> Iterator[tuple[str, Postgres]]:
    """A prepared database, for one test at a time."""
    dsn = postgres_server.new_database()
    with closing(Postgres(dsn, name="hub-a")) as made:
        postgres_schema.prepare(made)
        yield dsn, made


@pytest.fixture(params=["folder", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place without data."""
    if request.param == "folder":
        yield FolderPlace(tmp_path)
        return
    dsn, postgres = request.getfixturevalue("slot_database")
    s3: S3Server = request.getfixturevalue("s3_server")
    with postgres.transaction() as db:
        db.execute(f"TRUNCATE {', '.join(_EMPTIED)}")
    member = Member(name="hub-a", peer="127.0.0.1:1", certificate="", ingest="", version="0")
    leases = Leases(postgres, member, lease_s=3600)
    (lease,) = leases.take(1)
    with ExitStack() as stack:
        yield SlotPlace(tmp_path, dsn, postgres, s3.bucket(tmp_path.name), lease, stack)
    leases.release(lease)


@pytest.fixture
def store(place: Place) -> Iterator[HubStore]:
    with closing(place.open()) as opened:
        yield opened
