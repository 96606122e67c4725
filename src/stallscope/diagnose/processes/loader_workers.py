"""The activity of data-loader workers while their process waits for input."""

from collections import Counter
from dataclasses import dataclass, field

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes import code_locations
from stallscope.diagnose.processes.activity import Activity, item_of
from stallscope.diagnose.processes.buckets import text_of
from stallscope.diagnose.processes.code_locations import matches, user_line
from stallscope.events.names import SampleRole


@dataclass
class Workers:
    """The activity of worker processes while the GPU thread was blocked. n: samples in which they worked."""

    n: int = 0
    pids: set[int] = field(default_factory=set)
    states: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    objects: Counter[str] = field(default_factory=Counter)

    @property
    def line(self) -> str:
        return next((line for line, _ in self.lines.most_common(1)), "")

    def words(self) -> tuple[str, list[str]]:
        """The state that delays the workers, as text, and the next action."""
        state = next((name for name, _ in self.states.most_common(1)), "")
        name = next((text for text, _ in self.objects.most_common(1)), "")
        about = f" ({name})" if name else ""
        if state == "disk":
            return f"waits for its input, whose workers wait for a disk{about}", [
                "Move the data to a faster disk, read larger pieces, or keep it in memory."
            ]
        if state == "file_lock":
            return f"waits for its input, whose workers wait for a file lock{about}", [
                "Give each worker its own file or connection, so that the workers share no lock."
            ]
        if state == "network":
            return f"waits for its input, whose workers wait for the network{about}", [
                "Cache the data on this machine, or fetch more of it at the same time."
            ]
        if state == "locks":
            return "waits for its input, whose workers wait for a lock that they share", [
                "Remove the lock among the workers, or hold it for a shorter time."
            ]
        if state == "sleep":
            return "waits for its input, whose workers sleep", ["Remove the sleep from the workers."]
        if state == "on_cpu":
            return f"waits for its input: {len(self.pids)} workers compute without a pause", [
                "Raise num_workers, or make the transform cheaper (the line is in the workers).",
                "Check that the workers have their own CPUs.",
            ]
        return "waits for its input", ["Raise num_workers and prefetch_factor, or make the input cheaper."]

    def evidence(self) -> CauseEvidence:
        whole = max(sum(self.states.values()), 1)
        states = [f"{name.replace('_', ' ')} {n / whole:.0%}" for name, n in self.states.most_common(3)]
        return CauseEvidence(n_workers=len(self.pids), workers=states) if self.pids else CauseEvidence()


def workers_of(activity: Activity) -> Workers:
    workers = Workers()
    for row in activity.of_role(SampleRole.CHILD):
        frames = activity.frames(row)
        is_worker = text_of(row, "owner_comm").startswith("pt_data_worker") or matches(
            frames, code_locations.WORKS_FOR_LOADER
        )
        if not is_worker or matches(frames, code_locations.HELPER):
            continue
        workers.pids.add(int(row["owner_pid"]))
        text = text_of(row, "object")
        state = item_of(int(row["category"]))
        if text.startswith("lock on"):
            state = "file_lock"
        if text.startswith(("pipe", "full pipe", "a Unix")) or (state == "locks" and _waits_for_work(frames)):
            continue  # it waits for work, or for room to return its result
        n = int(row["n"])
        workers.n += n
        workers.states[state] += n
        if line := user_line(frames):
            workers.lines[line] += n
        if text:
            workers.objects[text] += n
    return workers


def _waits_for_work(frames: tuple[str, ...]) -> bool:
    return any("multiprocessing/queues.py" in frame for frame in frames[:3])
