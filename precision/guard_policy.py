"""What the guard does about a call that fails, as the user sets it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..trust.message import Told


class OnFailure(str, Enum):
    """What a failing call leads to. The values stand in people's workflow files."""

    RERUN = "rerun"
    STOP = "stop"
    OFF = "off"


class Scope(str, Enum):
    """How far a rerun reaches. The values stand in people's workflow files."""

    STEP = "step"  # the failing call alone
    LEARNED = "learned"  # and what made it fail, from the next call on
    RUN = "run"  # and all calls after it


@dataclass(frozen=True)
class GuardPolicy:
    """What the guard does about a call that fails."""

    on_failure: OnFailure = OnFailure.RERUN
    strict: bool = False  # rerun in plain fp32 instead of TF32 on cards that have it
    scope: Scope = Scope.LEARNED
    stay_after: int = 3  # failing calls of a run, in scope LEARNED, after which the rest of it is in fp32


class GuardStopped(Told, RuntimeError):
    """The guard ended the run; the message says which stage failed, how, and what to do."""
