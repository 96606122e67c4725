"""The slots of one hub: takes, opens, closes and hands over stores as leases come and go.

One thread renews the leases and does nothing else that could take long. Stores open and close in other threads. A
slot without data opens with its first row.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from stallscope.errors import Overloaded, StallscopeError
from stallscope.store.hub.store import HubStore
from stallscope.store.shared import leases as leases_of
from stallscope.store.shared.leases import Leases, Member, MemberState, SlotState
from stallscope.store.shared.postgres import Postgres
from stallscope.store.shared.postgres_journal import Lease

_LOG = logging.getLogger(__name__)
_MAX_EVERY_S = 1.0
_MIN_WAIT_S, _RETRY_S = 0.05, 0.2
_OPENED_AT_ONCE = 4


class OpenSlot(Protocol):
    """The store of a slot, with everything that works on it."""

    @property
    def store(self) -> HubStore:
        """The store."""

    def quiesce(self) -> None:
        """End everything except the acceptance of rows, which may wait for the bucket."""

    def close(self) -> None:
        """Commit the waiting rows, and close the store."""


@dataclass
class _Owned:
    lease: Lease
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: OpenSlot | None = None
    is_lost: bool = False
    is_ending: bool = False
    is_refusing: bool = False
    is_due: bool = False


class Membership:
    """A hub's part of the cluster. Thread-safe."""

    def __init__(
        self,
        postgres: Postgres,
        leases: Leases,
        *,
        opened: Callable[[Lease, Callable[[], None]], OpenSlot],
        with_data: Callable[[list[int]], set[int]],
        state: Callable[[], Mapping[str, Any]] = dict,
        learned: Callable[[list[MemberState]], None] = lambda members: None,
    ):
        """opened: opens the store of a slot; its second argument is called if the slot is lost.

        with_data: selects the slots that have data.
        state: for other hubs; learned: called with the states of all hubs.
        """
        self._postgres, self._leases = postgres, leases
        self._opened, self._with_data = opened, with_data
        self._state, self._learned = state, learned
        self._owned: dict[int, _Owned] = {}
        self._changed = threading.Condition()
        self._owners: dict[int, str] = {}
        self._members: dict[str, MemberState] = {}
        self._ended = threading.Event()
        self._is_leaving = False
        self._last_renewed_s = self._back_since_s = -float("inf")
        self._started_s = time.monotonic()
        self._threads = ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="slot")
        self._every_s = min(_MAX_EVERY_S, leases.lease_s / 10)
        self._due_s = 0.0
        self._thread = threading.Thread(target=self._run, name="slot-leases", daemon=True)

    def start(self) -> None:
        """Join the other hubs."""
        self._thread.start()

    @property
    def member(self) -> Member:
        """This hub."""
        return self._leases.member

    def owned_slots(self) -> list[int]:
        """The slots of this hub."""
        with self._changed:
            return sorted(slot for slot, owned in self._owned.items() if not owned.is_ending)

    def stores(self) -> list[HubStore]:
        """The open stores."""
        with self._changed:
            return [owned.open.store for owned in self._owned.values() if owned.open and not owned.is_ending]

    def open_slots(self) -> list[tuple[int, OpenSlot]]:
        """The open slots."""
        with self._changed:
            return [(slot, o.open) for slot, o in sorted(self._owned.items()) if o.open and not o.is_ending]

    def store(self, slot: int) -> HubStore | None:
        """The store of a slot of this hub; None if another hub owns it. Raises Overloaded while it cannot be opened."""
        with self._changed:
            owned = self._owned.get(slot)
            if owned is None or owned.is_refusing or owned.is_lost:
                return None
            if owned.open is not None:
                return owned.open.store
            if owned.is_ending:
                return None
        try:
            self._open(owned)
        except StallscopeError as error:
            raise Overloaded("the hub cannot open the cluster's data now; send again later", 2.0) from error
        open_slot = owned.open
        return open_slot.store if open_slot else None

    def owner(self, slot: int) -> Member | None:
        """The hub that owns a slot, to the knowledge of this hub; None if no hub does."""
        with self._changed:
            state = self._members.get(self._owners.get(slot, ""))
            return state.member if state and state.is_alive else None

    def owner_name(self, slot: int) -> str:
        """The name of the hub with the lease of a slot by the last known state; "" without one."""
        with self._changed:
            return self._owners.get(slot, "")

    def members(self) -> list[MemberState]:
        """The known hubs."""
        with self._changed:
            return list(self._members.values())

    def is_connected(self) -> bool:
        """Whether the leases were renewed lately."""
        return time.monotonic() - self._last_renewed_s < self._leases.lease_s

    def away_s(self) -> float:
        """Time since PostgreSQL last answered, if the leases were not renewed lately; otherwise 0."""
        return 0.0 if self.is_connected() else time.monotonic() - max(self._last_renewed_s, self._started_s)

    def drain(self) -> None:
        """Hand every slot over, and take no more."""
        self._is_leaving = True
        if self._thread.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._owned, timeout=60)

    def close(self) -> None:
        """Leave the cluster: commit, give the slots up."""
        self.drain()
        self._ended.set()
        self._thread.join()
        with self._changed:
            rest = list(self._owned.values())
        for owned in rest:
            self._close(owned)
        self._threads.shutdown(wait=True)
        try:
            self._leases.leave()
        except StallscopeError as error:
            _LOG.warning("the hub could not announce its departure; its leases will expire: %s", error)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._due_s = time.monotonic() + self._every_s
            try:
                self._turn()
            except StallscopeError as error:
                _LOG.warning("the leases of the slots could not be renewed: %s", error)
                with self._changed:
                    is_done = self._is_leaving and not self._is_connected_within(2.0)
                if is_done:
                    self._abandon()
            except Exception:  # noqa: BLE001 (the next turn repeats it; without turns the leases run out)
                _LOG.exception("the leases of the slots could not be renewed")
            self._ended.wait(max(_MIN_WAIT_S, self._due_s - time.monotonic()))

    def _is_connected_within(self, seconds: float) -> bool:
        return time.monotonic() - self._last_renewed_s < seconds

    def _abandon(self) -> None:
        """Leave without PostgreSQL: nothing can be committed or released; the leases run out."""
        with self._changed:
            owned = list(self._owned.values())
        for each in owned:
            self._end(each, is_released=False)

    def _turn(self) -> None:
        with self._changed:
            before = set(self._owned)
        epoch_of_slot = self._leases.renew(self._state(), is_leaving=self._is_leaving)
        now_s, before_s = time.monotonic(), self._last_renewed_s
        self._last_renewed_s = now_s
        lease_s = self._leases.lease_s
        is_gap = before_s > -float("inf") and now_s - before_s > lease_s - 2 * self._every_s
        if (
            is_gap and now_s - self._back_since_s > 2 * lease_s
        ):  # a busy machine must not wait again and again
            self._back_since_s = now_s
        with self._changed:
            for slot in epoch_of_slot.keys() - before - self._owned.keys():
                # The answer to a take was lost, or a release failed: this hub renews the lease, so it must use it.
                self._owned[slot] = _Owned(Lease(slot, self.member.name, epoch_of_slot[slot]), is_due=True)
            owned = list(self._owned.values())
        for each in owned:
            if epoch_of_slot.get(each.lease.slot) != each.lease.epoch:
                self._end(each, is_released=False)
            elif each.is_lost:
                self._end(each, is_released=False, is_opened_again=True)
        self._balance()
        self._open_due()
        slots, members = leases_of.directory(self._postgres, lease_s=self._leases.lease_s)
        self._learn(slots, members)

    def _learn(self, slots: list[SlotState], members: list[MemberState]) -> None:
        with self._changed:
            self._owners = {each.slot: each.owner for each in slots if each.expires_in_s > 0}
            self._members = {each.member.name: each for each in members}
        # A foreign lease may be a dead hub's: the next turn is at its end, and soon again while no hub has the slot.
        others = [each.expires_in_s for each in slots if each.owner not in ("", self.member.name)]
        first_s = min((max(each, _RETRY_S) for each in others), default=self._every_s)
        self._due_s = min(self._due_s, time.monotonic() + first_s + _MIN_WAIT_S)
        self._learned([each for each in members if each.is_alive and each.member != self.member])

    def _balance(self) -> None:
        """Take slots up to the share, or hand the surplus over.

        After PostgreSQL was away for the time of a lease, all leases have run out: the other hubs get as much time to
        renew theirs.
        """
        if self._is_leaving:
            for each in list(self._owned.values()):
                self._end(each, is_released=True)
            return
        share = self._leases.share()
        with self._changed:
            kept = [each for each in self._owned.values() if not each.is_ending]
            n_all = len(self._owned)
        for each in kept[share:]:
            self._end(each, is_released=True)
        if n_all < share and time.monotonic() - self._back_since_s >= self._leases.lease_s:
            for lease in self._leases.take(share - n_all):
                with self._changed:
                    self._owned[lease.slot] = _Owned(lease, is_due=True)

    def _open_due(self) -> None:
        with self._changed:
            due = [each for each in self._owned.values() if each.is_due and not each.is_ending]
            for each in due:
                each.is_due = False
        if due:
            self._threads.submit(self._open_those_with_data, due)

    def _open_those_with_data(self, due: list[_Owned]) -> None:
        try:
            slots = self._with_data([each.lease.slot for each in due])
        except Exception as error:  # noqa: BLE001 (logged; retried)
            _LOG.warning("the slots cannot be opened: %s", error)
            for each in due:
                each.is_due = True
            return
        for each in due:
            if each.lease.slot in slots:
                self._threads.submit(self._open_early, each)

    def _open_early(self, owned: _Owned) -> None:
        """Open a slot before its first row arrives."""
        try:
            self._open(owned)
        except StallscopeError as error:
            _LOG.warning("slot %d cannot be opened: %s", owned.lease.slot, error)
            owned.is_due = True
        except Exception:  # noqa: BLE001 (logged; retried)
            _LOG.exception("slot %d cannot be opened", owned.lease.slot)
            owned.is_due = True

    def _open(self, owned: _Owned) -> None:
        with owned.lock:
            if owned.open is not None or owned.is_ending:
                return

            def lost() -> None:
                owned.is_lost = True

            opened = self._opened(owned.lease, lost)
            with self._changed:
                owned.open = opened
                self._changed.notify_all()

    def _end(self, owned: _Owned, *, is_released: bool, is_opened_again: bool = False) -> None:
        """Close a slot in another thread; then release it or open it again.

        A slot that is handed over accepts rows until only their commit remains to be done.
        """
        with self._changed:
            owned.is_refusing |= not is_released
            if owned.is_ending:
                return
            owned.is_ending = True

        def end() -> None:
            with ExitStack() as steps:  # in reverse, each even if another step fails
                steps.callback(self._forget, owned, is_opened_again=is_opened_again)
                if is_released:
                    steps.callback(self._leases_release, owned.lease)
                steps.callback(self._close, owned)
                if is_released:
                    self._quiesce(owned)

        done: Future[None] = self._threads.submit(end)
        done.add_done_callback(_logged)

    def _forget(self, owned: _Owned, *, is_opened_again: bool) -> None:
        slot = owned.lease.slot
        with self._changed:
            del self._owned[slot]
            if is_opened_again:
                self._owned[slot] = _Owned(owned.lease, is_due=True)
            self._changed.notify_all()

    def _quiesce(self, owned: _Owned) -> None:
        with owned.lock:
            if owned.open is not None:
                owned.open.quiesce()

    def _close(self, owned: _Owned) -> None:
        with self._changed:
            owned.is_refusing = True
        with owned.lock:
            if owned.open is not None:
                open_slot, owned.open = owned.open, None
                open_slot.close()

    def _leases_release(self, lease: Lease) -> None:
        try:
            self._leases.release(lease)
        except StallscopeError as error:
            _LOG.warning("slot %d could not be released and is opened again: %s", lease.slot, error)


def _logged(done: "Future[None]") -> None:
    if error := done.exception():
        _LOG.error("a slot could not be closed", exc_info=error)
