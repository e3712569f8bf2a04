"""The course of a batch: jobs are read as there is room, go to the workers that suit them, and are tried again, or
parked, where that fails.

It holds a window of jobs and no more, whatever the file's length. All else that it knows is in the folder of outputs.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...trust.text import for_terminal
from ..errors import HostError, OutputError
from .affinity import Landing, Warmth, choose
from .claims import Claims
from .crew import Crew, Event, Worker
from .jobs import Job
from .outputs import MAX_ERROR, RUNNING, Outputs, Parked
from .tally import Tally
from .window import Window
from .work import Away, Done, Failed, Lost, Refused, Stopped

PATIENCE = 8.0  # warm jobs that getting warm takes the time of, until both were measured
LOOK_SECONDS = 1.0  # between two looks at what takes too long
LATE_SECONDS = 60.0  # beyond --timeout, after which a worker is ended that did not stop by itself
WAIT_SECONDS = 30.0  # without any worker, after which that is said
MAX_REFUSALS = 8  # of one job by workers, before it is parked


@dataclass
class Costs:
    """What getting warm costs, in warm jobs, from the jobs that ran: means of the latest."""

    warm: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    cold: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def add(self, done: Done) -> None:
        (self.warm if done.landing is Landing.WARM else self.cold).append(done.seconds)

    def patience(self) -> float:
        if not (self.warm and self.cold):
            return PATIENCE
        warm, cold = (sum(seconds) / len(seconds) for seconds in (self.warm, self.cold))
        return max((cold - warm) / warm, 1.0) if warm else PATIENCE


@dataclass
class Course:
    window: Window
    crew: Crew
    outputs: Outputs
    tally: Tally
    attempts: int = 3  # that end with their worker, before a job is parked
    timeout: float | None = None  # seconds for one job
    now: Callable[[], float] = time.monotonic
    _running: dict[str, tuple[Worker, Job, float]] = field(default_factory=dict)  # content → who, what, since when
    _elsewhere: dict[str, Job] = field(default_factory=dict)  # content → what another batch computes
    _idle: dict[int, Worker] = field(default_factory=dict)
    _owners: Counter[Warmth] = field(default_factory=Counter)
    _costs: Costs = field(default_factory=Costs)
    _heard: float = 0.0  # when something came of a worker, or its silence was told
    _looked: float = 0.0
    _left: dict[int, str] = field(default_factory=dict)  # workers that are of no more use, and why

    @cached_property
    def claims(self) -> Claims:
        return Claims(self.outputs.folder / RUNNING)

    def run(self) -> None:
        """Until no job is left.

        Raises:
            OutputError: nothing can be written.
            HostError: no worker is left.
        """
        self._heard = self._looked = self.now()
        self.window.widen(len(self.crew.workers))
        self.outputs.ensure()
        self.claims.sweep()
        try:
            self._run()
        finally:
            self.claims.release_all()

    def _run(self) -> None:
        while self.window.fill({*self._running, *self._elsewhere}) or self._running or self._elsewhere:
            while self._hand_out():
                ...
            if len(self._left) == len(self.crew.workers):
                raise HostError(f"No worker is left to run jobs on. {'; '.join([*self._left.values()][:3])}.")
            with suppress(queue.Empty):
                self._take(self.crew.events.get(timeout=LOOK_SECONDS))
                self._heard = self.now()
            if (now := self.now()) - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look(now)

    def _hand_out(self) -> bool:
        """Give jobs to those that are idle. Returns whether to do so again, since one that was chosen is not to be done
        here."""
        waiting: set[Warmth] | None = None  # kinds of jobs, once one had nothing to do: others have neither, but theirs
        for number, worker in list(self._idle.items()):
            if waiting is not None and waiting.isdisjoint(worker.warm):
                continue
            places = self.window.open_to(worker.name)
            warmths = self.window.warmths(places)
            chosen = choose(warmths, worker.warm, self._owners, self._costs.patience(), self._ahead())
            if chosen is None and places and not self._running:  # nobody works who could be waited for
                chosen = 0
            if chosen is None:
                if len(places) == len(self.window):  # it has refused none of them
                    waiting = set(warmths)
                continue
            waiting = None
            job = self.window.take(places[chosen])
            if not self._claimed(job):
                return True
            del self._idle[number]
            self._running[job.content] = worker, job, self.now()
            worker.start(job)
            self._warm(worker, {*worker.warm, job.warmth})
        return False

    def _claimed(self, job: Job) -> bool:
        """Claim a job for this batch, unless another has it, or has done it meanwhile."""
        try:
            mine = self.claims.take(job.content)
        except OSError as error:
            raise OutputError(f"Cannot write to {self.outputs.folder}: {error.strerror or error}.") from error
        if not mine:
            self._elsewhere[job.content] = job
        elif self.window.skip(job):
            self.claims.release(job.content)
            mine = False
        return mine

    def _ahead(self) -> float:
        """How many jobs are still to be handed out for each that is in the window."""
        left = self.tally.total - self.tally.over - len(self._running)
        return max(left / len(self.window), 1.0) if self.window else 1.0

    def _take(self, event: Event) -> None:
        worker, job, outcome = event
        if job is None:
            self._greet(worker, outcome)
            return
        self._running.pop(job.content, None)
        if isinstance(outcome, (Done, Failed, Refused)):
            self._warm(worker, outcome.warm)
            self._idle[id(worker)] = worker
        if isinstance(outcome, Done):
            self._costs.add(outcome)
            self.outputs.unpark(job.content)
            self.tally.finished(job, worker.name, outcome)
        elif isinstance(outcome, Failed):
            self._park(job, outcome.error, job.attempts + 1)
        elif isinstance(outcome, Refused):
            self._ask_others(worker, job, outcome.error)
        elif isinstance(outcome, Stopped):
            raise OutputError(outcome.error)
        elif isinstance(outcome, (Lost, Away)):
            self._again(worker, job, outcome)
        self.claims.release(job.content)

    def _again(self, worker: Worker, job: Job, outcome: Lost | Away) -> None:
        self._warm(worker, ())
        worker.renew()
        if isinstance(outcome, Away):
            self.window.put(job)
            self.tally.say(f"{worker.name} is away: {outcome.reason}")
            return
        tried = replace(job, attempts=job.attempts + 1)
        again = tried.attempts < self.attempts
        self.tally.lost_worker(job, worker.name, outcome.reason, again=again)
        if again:
            self.window.put(tried)
        else:
            times = "once" if tried.attempts == 1 else f"{tried.attempts} times"
            self._park(job, f"It ended its worker {times}, at last so: {outcome.reason}", tried.attempts)

    def _ask_others(self, worker: Worker, job: Job, error: str) -> None:
        """Another worker may have what this one lacks. Where none is left to ask, the job is parked."""
        self.window.put(replace(job, refusals={**job.refusals, worker.name: error}))
        if self._park_refused(lambda each: id(each) not in self._left) == 0:
            self.tally.say(f"{worker.name} does not take {job.name}: {' '.join(error.split())}")

    def _park_refused(self, may: Callable[[Worker], bool]) -> int:
        """Park the jobs that were refused, and that no other worker may take; how many these were."""
        parked = 0
        for place in reversed(range(len(self.window))):
            refusals = self.window[place].refusals
            others = any(may(each) and each.name not in refusals for each in self.crew.workers)
            if refusals and (len(refusals) >= MAX_REFUSALS or not others):
                self._park(self.window.take(place), [*refusals.values()][-1], len(refusals))
                parked += 1
        return parked

    def _park(self, job: Job, error: str, attempts: int) -> None:
        name, error = for_terminal(job.name), for_terminal(error)  # half a character cannot be written
        self.outputs.park(Parked(content=job.content, name=name[:400], error=error[:MAX_ERROR], attempts=attempts))
        self.tally.gave_up(job, error)

    def _greet(self, worker: Worker, outcome: object) -> None:
        if worker.ready:
            self._idle[id(worker)] = worker
        elif isinstance(outcome, Lost):
            self._left[id(worker)] = f"{worker.name}: {outcome.reason}"
            self.tally.say(f"{worker.name} is of no use: {outcome.reason}")
            self._park_refused(lambda each: id(each) not in self._left)
        elif isinstance(outcome, Away):
            self.tally.say(f"{worker.name}: {outcome.reason}")
        else:
            worker.renew()

    def _warm(self, worker: Worker, warm: Iterable[Warmth]) -> None:
        """Note for what a worker is warm from now on."""
        self._owners.subtract(worker.warm)
        worker.warm = frozenset(warm)
        self._owners.update(worker.warm)
        self._owners = +self._owners

    def _look(self, now: float) -> None:
        self.crew.grow()
        self.window.widen(len(self.crew.workers))
        self.claims.touch()
        for content in [content for content in self._elsewhere if self.claims.free(content)]:
            self.window.put(self._elsewhere.pop(content))
        if self.timeout:
            for worker, _, since in self._running.values():
                if now - since > self.timeout + LATE_SECONDS:
                    worker.end()
        if not self._running and now - self._heard > WAIT_SECONDS:
            if self._park_refused(lambda each: each.ready):  # whoever else might take them does not come
                return
            if self.window:
                self.tally.say("Waiting for a worker: none is ready. Are all GPUs of the cluster taken?")
            else:
                self.tally.say(f"Waiting for {len(self._elsewhere)} jobs that another batch computes into this folder.")
            self._heard = now
