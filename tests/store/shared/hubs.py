"""Builders for the tests of hubs that share their data."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stallscope.errors import Overloaded
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore
from stallscope.store.shared.shared_store import SharedStore, Sharing
from stallscope.store.shared.slots import N_SLOTS

STILL = Limits(maintenance_s=3600, settle_s=0)
LEASE_S = 3.0


class NoWork:
    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True)
class Started:
    """Starts hubs that share a new database and a new prefix of the bucket."""

    dsn: str
    bucket: str
    folder: Path
    stack: ExitStack

    def __call__(
        self, name: str, limits: Limits = STILL, lease_s: float = LEASE_S, work: Callable[[], NoWork] = NoWork
    ) -> SharedStore:
        sharing = Sharing(
            postgres=self.dsn,
            bucket=self.bucket,
            cache=self.folder / name,
            name=name,
            version="0",
            peer_listen="127.0.0.1:0",
            peer_host="127.0.0.1",
            lease_s=lease_s,
        )
        return self.stack.enter_context(closing(SharedStore(sharing, limits, work=lambda _: work())))


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "the condition does not become true"
        time.sleep(0.05)


def settled(*stores: SharedStore) -> None:
    """Wait until all slots have their owners, and every hub knows them."""
    share = N_SLOTS // len(stores)
    until(lambda: all(len(store.membership.owned_slots()) == share for store in stores))
    until(lambda: all(store.membership.owner(slot) for store in stores for slot in range(N_SLOTS)))
    names = {
        slot: store.membership.member.name for store in stores for slot in store.membership.owned_slots()
    }

    def is_owner(name: str, of: SharedStore, slot: int) -> bool:
        owner = of.membership.owner(slot)  # None again if a lease of the slot has just run out
        return owner is not None and owner.name == name

    until(lambda: all(is_owner(name, store, slot) for store in stores for slot, name in names.items()))


def events(cluster: str, *names: str) -> pa.Table:
    n = len(names)
    return pa.table(
        {"ts_ns": list(range(1, n + 1)), "cluster_id": [cluster] * n, "node_id": ["n"] * n, "name": names}
    )


def stored(store: SharedStore | HubStore, batch: Batch) -> bool:
    """Whether the batch was a duplicate; repeated as a sender would."""
    end_s = time.monotonic() + 30
    while True:
        try:
            return store.append(batch).result(30).is_duplicate
        except Overloaded:
            assert time.monotonic() < end_s
            time.sleep(0.1)


def store_a_row_of_each_cluster(store: SharedStore) -> None:
    """A row with the name of its cluster, in a batch of that name."""
    for cluster in CLUSTERS:
        stored(store, Batch(cluster, "a", {"events": events(cluster, cluster)}))


def names(store: SharedStore, tenant: str = "a") -> list[str]:
    snapshot = store.snapshot(tenant, tables=("events",))
    import pyarrow.parquet as pq

    sealed = [
        name
        for segment in snapshot.segments.get("events", ())
        for name in pq.read_table(store.folder / segment.path, partitioning=None)["name"].to_pylist()
    ]
    hot = snapshot.hot["events"]["name"].to_pylist() if "events" in snapshot.hot else []
    return sorted(sealed + hot)


def slot_stores(store: SharedStore) -> list[HubStore]:
    return store.membership.stores()


CLUSTERS = [f"cluster-{n}" for n in range(6)]
