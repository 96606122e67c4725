"""A hub that shares its data with other hubs: its store, a diagnosis for each of its slots, and the file of tokens."""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallscope.continuous.shard import Shard, ShardTotals, stored_tail
from stallscope.continuous.stream_pool import StreamPool
from stallscope.diagnose import Stream
from stallscope.errors import BadInput, StallscopeError, remedy_for_extra
from stallscope.serve.server import address
from stallscope.serve.tokens import FILE_NAME as TOKENS_FILE
from stallscope.settings import Settings
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

if TYPE_CHECKING:  # psycopg belongs to the extra `shared`
    from stallscope.store.shared.shared_store import SharedStore

_LOG = logging.getLogger(__name__)
_TOKENS_S = 2.0
_MAX_CLOCK_S = 10.0


class SlotDiagnoses:
    """The diagnoses of the slots of a hub, which come and go with the slots. Thread-safe."""

    def __init__(self, make_stream: Callable[[], Stream], n_processes: int):
        """n_processes: of the streams of all slots."""
        self._pool = StreamPool(make_stream, n_processes)
        self._lock = threading.Lock()
        self._open: list[Shard] = []
        self._ended = ShardTotals()

    def start(self, store: HubStore) -> "SlotWork":
        """Start the diagnosis of a slot, until its close(). Its stored rows are read while it accepts new rows."""
        tail = stored_tail(store, until_us=store.latest_us)
        shard = Shard(store, self._pool.streams(), tail, owns=lambda key: True)
        store.subscribe(shard.add)
        with self._lock:
            self._open.append(shard)
        return SlotWork(self, shard)

    def remove(self, shard: Shard) -> None:
        """Forget the diagnosis of a slot, except its totals."""
        with self._lock:
            self._open.remove(shard)
            self._ended = ShardTotals.of_all([self._ended, replace(shard.numbers, diagnosis_lag_s=0.0)])

    def close(self) -> None:
        """End the processes of the streams."""
        self._pool.close()

    def _all(self) -> list[Shard]:
        with self._lock:
            return list(self._open)

    @property
    def numbers(self) -> ShardTotals:
        """The totals of all slots since the start; the largest lag of the open slots."""
        with self._lock:
            return ShardTotals.of_all([self._ended, *(shard.numbers for shard in self._open)])

    def confirmed_ns(self, tenant: str) -> dict[str, int]:
        """When the diagnosis last confirmed each open incident of a tenant, ns since 1970; of slots of this hub."""
        return {
            incident: at_ns for shard in self._all() for incident, at_ns in shard.confirmed_ns(tenant).items()
        }


@dataclass(frozen=True)
class SlotWork:
    """The work on one slot."""

    diagnoses: SlotDiagnoses
    shard: Shard

    def close(self) -> None:
        """Stop."""
        self.shard.close()
        self.diagnoses.remove(self.shard)


class SharedHub:
    """The shared parts of a hub; must be closed with close()."""

    def __init__(self, store: "SharedStore", diagnosis: SlotDiagnoses, folder: Path, *, lease_s: float):
        from stallscope.store.shared.shared_file import SharedFile

        self.store, self.diagnosis, self._lease_s = store, diagnosis, lease_s
        self._tokens = SharedFile(store.postgres, folder / TOKENS_FILE)
        self._tokens.pull()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-tokens", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the other hubs."""
        self._ended.set()
        self._thread.join()
        self.store.close()
        self.diagnosis.close()

    def is_first(self) -> bool:
        """Whether this hub does what one hub does for all: it owns slot 0."""
        return 0 in self.store.membership.owned_slots()

    def status(self) -> Mapping[str, Any]:
        """Hubs, slots and their owners, see `stallscope hub status`."""
        from stallscope.store.shared.cluster_status import status

        return status(self.store.postgres, lease_s=self._lease_s)

    def caveat(self) -> str:
        """What does not work at present, because PostgreSQL or the bucket does not answer; "" while both answer."""
        away = self.store.away()
        if away_s := away["postgres_away_s"]:
            return f"PostgreSQL has not answered for {away_s:.0f} s: agents keep their rows, and no verdict appears."
        if away_s := away["bucket_away_s"]:
            return f"The bucket has not answered for {away_s:.0f} s: rows are stored, but queries of older rows fail."
        if abs(ahead_s := self.store.clock_ahead_s()) > _MAX_CLOCK_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            return f"The clock of this hub is {abs(ahead_s):.0f} s {side} the clock of PostgreSQL: times may be wrong."
        return ""

    def slot_numbers(self) -> dict[int, dict[str, float]]:
        """Numbers of each open slot, for /metrics."""
        out = {}
        for slot, each in self.store.membership.open_slots():
            rows, _ = each.store.queued()
            out[slot] = {
                "rows_stored": each.store.counters.rows,
                "queue_rows": rows,
                "hot_bytes": each.store.hot_bytes,
                "commit_seconds": each.store.counters.commit_s,
                "housekeeping_failures": each.store.kept.housekeeping_failures,
            }
        return out

    def _run(self) -> None:
        """Tokens that another hub or command has changed hold here within seconds."""
        while not self._ended.wait(_TOKENS_S):
            try:
                self._tokens.pull()
            except StallscopeError as error:
                _LOG.warning("the tokens cannot be read from PostgreSQL: %s", error)


def opened(
    settings: Settings,
    folder: Path,
    limits: Limits,
    make_stream: Callable[[], Stream],
    *,
    n_processes: int,
) -> SharedHub | None:
    """The shared parts of the settings; None for a hub alone. Raises BadInput, StorageFailed, NewerSchema.

    n_processes: of the diagnosis.
    """
    if not settings.hub_shared:
        if settings.hub_bucket:
            raise BadInput("--bucket needs --shared, the PostgreSQL of the hubs; give both or neither")
        if settings.hub_direct:
            raise BadInput("--direct needs --shared and --bucket: a hub alone gets all rows itself")
        return None
    if not settings.hub_bucket:
        raise BadInput("--shared needs --bucket, the bucket of the sealed files; give both or neither")
    try:
        from stallscope.store.shared.shared_store import SharedStore, Sharing
    except ImportError as error:
        raise BadInput(f"--shared needs {error.name}: {remedy_for_extra('shared')}") from error
    host, port = address(settings.hub_peer, "--peer")
    diagnoses = SlotDiagnoses(make_stream, n_processes)
    sharing = Sharing(
        postgres=settings.hub_shared,
        bucket=settings.hub_bucket,
        cache=folder,
        name=f"stallscope-{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(4)}",
        version=_version(),
        peer_listen=f"{host or '0.0.0.0'}:{port}",
        peer_host=settings.hub_peer_host or socket.gethostname(),
        ingest=settings.hub_direct,
        lease_s=settings.hub_lease_s,
        max_cache_bytes=settings.hub_cache_bytes,
    )
    with ExitStack() as stack:
        stack.callback(diagnoses.close)
        store = SharedStore(sharing, limits, work=diagnoses.start)
        stack.callback(store.close)
        hub = SharedHub(store, diagnoses, folder, lease_s=settings.hub_lease_s)
        stack.pop_all()
    return hub


def _version() -> str:
    try:
        return version("stallscope")
    except PackageNotFoundError:
        return "unknown"
