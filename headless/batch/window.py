"""The jobs that wait, as many as a worker has to choose from and no more, whatever the length of the file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from .affinity import Warmth
from .jobs import Job, Unmade
from .outputs import Outputs
from .tally import Tally

SIZE = 256  # jobs at least
EACH = 4  # for each worker, where that is more: with fewer, many kinds of jobs have workers find none of theirs


class Window:
    """Jobs that were read, neither done nor parked, each content once.

    Args:
        jobs: all of them.
        retry: also those that an earlier run parked.
    """

    def __init__(self, jobs: Iterator[Job | Unmade], outputs: Outputs, tally: Tally, *, retry: bool = False) -> None:
        self._jobs, self._outputs, self._tally, self._retry = jobs, outputs, tally, retry
        self._waiting: list[Job] = []
        self._size = SIZE
        self._contents: set[str] = set()
        self._refused = 0  # how many of those that wait some worker has refused

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, place: int) -> Job:
        """One that waits, from 0, the oldest."""
        return self._waiting[place]

    def open_to(self, worker: str) -> Sequence[int]:
        """The places of those that a worker of this name has not refused."""
        if not self._refused:
            return range(len(self._waiting))
        return [place for place, job in enumerate(self._waiting) if worker not in job.refusals]

    def warmths(self, places: Iterable[int]) -> list[Warmth]:
        """What those need that wait at these places."""
        return [self._waiting[place].warmth for place in places]

    def widen(self, workers: int) -> None:
        """Hold enough for so many workers to choose from."""
        self._size = max(SIZE, EACH * workers)

    def fill(self, running: Collection[str] = ()) -> bool:
        """Read jobs until there are enough, and say whether any waits. running: contents of jobs on their way."""
        while len(self._waiting) < self._size and (job := next(self._jobs, None)) is not None:
            if isinstance(job, Unmade):
                self._tally.gave_up(job, job.error)
            elif job.content in self._contents or job.content in running:
                self._tally.skipped(job, "")
            elif not self.skip(job):
                self.put(job, -1)
        return bool(self._waiting)

    def skip(self, job: Job) -> bool:
        """Count a job that is done, or parked, and say whether it is."""
        parked = None if self._retry else self._outputs.parked(job.content)
        over = self._outputs.has(job.content)
        if over or parked:
            self._tally.skipped(job, "" if over or not parked else parked.error)
        return over or parked is not None

    def put(self, job: Job, place: int = 0) -> None:
        """Have a job wait: before all others, or after them at -1."""
        self._waiting.insert(len(self._waiting) if place < 0 else place, job)
        self._contents.add(job.content)
        self._refused += bool(job.refusals)

    def take(self, place: int) -> Job:
        job = self._waiting.pop(place)
        self._contents.discard(job.content)
        self._refused -= bool(job.refusals)
        return job
