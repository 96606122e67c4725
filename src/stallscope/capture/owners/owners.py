"""The owner of each traced process: its environment, completed by the schedulers as they answer.

    owners = Owners(sources, privacy, note)
    owners.start()
    rows = owners.rows(new, variables, node=0, now_ns=now_ns)     # once a second
    owners.close()

A scheduler that does not answer costs one line for the user; the other labels stay.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from stallscope.capture.owners.hints import N_PEERS, hints
from stallscope.capture.owners.privacy import Privacy
from stallscope.capture.owners.source import VISIBLE, Allocation, Source
from stallscope.capture.process.workload import workload
from stallscope.credentials import masked
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.owner import column

_MAX_BYTES = 128
_MAX_PAUSE_S = 300.0


class Owners:
    """The owners of the processes of one machine. For one thread; each source has a thread of its own."""

    def __init__(
        self,
        sources: Sequence[Source] = (),
        privacy: Privacy | None = None,
        note: Callable[[str], None] = lambda text: None,
        *,
        process_labels: Callable[[int, Mapping[str, str]], dict[str, str]] = workload,
    ):
        self._sources, self._privacy, self._note = sources, privacy or Privacy(), note
        self._process_labels = process_labels
        self._known: dict[int, dict[str, str]] = {}
        self._hints: dict[int, dict[str, str]] = {}
        self._of_scheduler: dict[int, dict[str, str]] = {}
        self._labels: dict[int, dict[str, str]] = {}
        self._stored: dict[int, dict[str, str]] = {}
        self._remarks: list[str] = []
        self._is_over = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for source in self._sources:
            threading.Thread(
                target=self._run, args=(source,), name=f"owners-{source.name}", daemon=True
            ).start()

    def close(self) -> None:
        """End the threads; a request that is under way is given up."""
        self._is_over.set()

    def rows(
        self, new: Mapping[int, Mapping[str, str]], *, node: int, now_ns: int, first_ns: Mapping[int, int]
    ) -> Array:
        """Rows of OWNERS for new processes, and for processes whose labels have changed.

        new: the environment of each new process. first_ns: the time of its first event.
        """
        while self._remarks:
            self._note(self._remarks.pop(0))
        for pid in new:
            self.forget(pid)
        self._known |= {pid: self._process_labels(pid, variables) for pid, variables in new.items()}
        self._hints |= {pid: hints(pid, variables) for pid, variables in new.items()}
        changed = {}
        for pid in self._known:
            self._labels[pid] = self._completed(pid)
            owner = self._privacy.applied(self._labels[pid])
            if owner != self._stored.get(pid, {}):
                changed[pid] = self._stored[pid] = owner
        rows = layout.empty(layout.OWNERS, len(changed))
        rows["node"], rows["pid"] = node, list(changed)
        rows["ts_ns"] = [first_ns.get(pid, now_ns) for pid in changed]
        for row, owner in zip(rows, changed.values(), strict=True):
            for label, value in owner.items():
                row[column(label)] = _cut(value)
        return rows

    def labels(self, pid: int) -> dict[str, str]:
        """All labels of a process, as of the last call of rows()."""
        return self._labels.get(pid, {})

    def _completed(self, pid: int) -> dict[str, str]:
        """All labels now. A label stays when its scheduler forgets the job, which may end before its processes."""
        known, more = self._known[pid], self._of_scheduler.setdefault(pid, {})
        for source in self._sources:
            more |= source.labels(known | more, self._hints[pid])
        return known | more

    def gpu_uuid(self, pid: int) -> str:
        """The only GPU or MIG instance that a process sees, if its environment names it by UUID; otherwise empty."""
        named = [self._hints.get(pid, {}).get(name, "") for name in VISIBLE]
        return next((text for text in named if text.startswith(("GPU-", "MIG-")) and "," not in text), "")

    def n_peers(self, pid: int) -> int:
        """The number of processes of the group that started this process; 1 without a group."""
        return int(self._hints.get(pid, {}).get(N_PEERS, 1))

    def allocations(self) -> list[Allocation]:
        """The GPUs that jobs hold, by all sources."""
        return [allocation for source in self._sources for allocation in source.allocations()]

    def private(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that the privacy settings allow to be stored."""
        return self._privacy.applied(labels)

    def forget(self, pid: int) -> None:
        """This process has ended."""
        for of_process in (self._known, self._hints, self._of_scheduler, self._labels, self._stored):
            of_process.pop(pid, None)

    def _run(self, source: Source) -> None:
        n_failures = 0
        while not self._is_over.is_set():
            try:
                source.refresh()
                n_failures = 0
            except Exception as error:  # noqa: BLE001 (the boundary to a scheduler; the loop must survive any answer)
                if not n_failures:
                    self._remarks.append(
                        f"owners of {source.name} are incomplete: {masked(str(error))}; stallscope will retry"
                    )
                n_failures += 1
            pause_s = min(max(source.every_s, 1.0) * 2**n_failures, _MAX_PAUSE_S)
            self._is_over.wait(pause_s if n_failures else source.every_s)


def _cut(value: str) -> bytes:
    """The value as it fits into a column: printable, on a whole character."""
    text = "".join(character for character in value if character.isprintable())
    return text.encode()[:_MAX_BYTES].decode(errors="ignore").encode()
