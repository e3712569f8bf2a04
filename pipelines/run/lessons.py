"""What runs taught about a model: in memory for this process, in a profile for later ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ...precision.learned import NOTHING, Learned
from ...trust.message import Message, message_of
from ..errors import BadProfile
from ..parallel.group import here as ranks
from .handle import PipelineHandle
from .profiles import Profile, identify, read, write

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptProfile:
    """The profile of one model, card and dtype, on disk or given by the user."""

    here: Profile  # while nothing is known
    folder: Path | None  # in which profiles are kept; None: nowhere
    given: Profile | None = None  # by the user, in place of a kept one

    def known(self, parts: Iterable[str] = ()) -> tuple[Learned, tuple[str, ...]]:
        """What a profile says, and lines for the report: what it brought, or why it was left alone.

        parts: of the model, those that may run in fp32, or wide.
        """
        try:
            found = self.given or self._on_disk()
        except BadProfile as error:
            return NOTHING, (message_of(error),)
        if found is None:
            return NOTHING, ()
        if misfit := found.misfit(self.here, parts):
            which = Message("the profile that was given") if self.given else Message("the profile {}", self.here.name)
            return NOTHING, (Message("{} is left alone: {}", which, misfit),)
        return found.learned, (Message("from a profile: {}", found.in_words()),)

    def keep(self, learned: Learned) -> None:
        """Write it, unless the given profile or the kept one says it. A disk that refuses is logged."""
        profile = replace(self.here, learned=learned.to_share)
        if self.folder is None or self._is_given(profile):
            return
        try:
            if not self._is_kept(profile):
                logger.info("keeping a profile: %s", write(self.folder, profile))
        except OSError as error:
            logger.warning("The profile %s could not be kept in %s: %s", profile.name, self.folder, error)

    def _is_given(self, profile: Profile) -> bool:
        given, known = self.given, profile.learned
        return given is not None and given.learned == known and not given.misfit(profile, known.parts)

    def _is_kept(self, profile: Profile) -> bool:
        try:
            return self._on_disk() == profile
        except BadProfile:
            return False

    def _on_disk(self) -> Profile | None:
        file = self.folder and self.folder / f"{self.here.name}.json"
        return read(file) if file and file.is_file() else None


def recall(handle: PipelineHandle, denoiser: str, dtype: str, parts: Iterable[str]) -> tuple[Learned, tuple[str, ...]]:
    """What is known of a denoiser, and lines for the report. parts: as `KeptProfile.known`'s."""
    key = handle.memory_key(denoiser, dtype)
    if key in handle.store.learned:
        return handle.store.learned[key], ()
    learned, notes = _profile(handle, denoiser, dtype).known(parts)
    handle.store.learned[key] = learned
    if handle.profile is None and learned != NOTHING:
        handle.store.recalled.add(key)
    return learned, notes


def remember(handle: PipelineHandle, denoiser: str, dtype: str, learned: Learned) -> None:
    """What is known from now on, for as long as the store lives. That a run went on in fp32 is of that run alone."""
    handle.store.learned[handle.memory_key(denoiser, dtype)] = replace(learned, whole_run_fp32=False)


def keep(handle: PipelineHandle, denoiser: str, dtype: str) -> None:
    """Write what is known to a profile. Nothing is written too, where runs forgot what the kept profile says. Of ranks,
    the first one writes it for all."""
    if not ranks().first:
        return
    key = handle.memory_key(denoiser, dtype)
    learned = handle.store.learned.get(key, NOTHING)
    if learned.to_share != NOTHING or key in handle.store.recalled:
        _profile(handle, denoiser, dtype).keep(learned)


def _profile(handle: PipelineHandle, denoiser: str, dtype: str) -> KeptProfile:
    return KeptProfile(here(handle, denoiser, dtype), handle.profiles, handle.profile)


def here(handle: PipelineHandle, denoiser: str, dtype: str) -> Profile:
    """The profile of a denoiser of which nothing is known yet."""
    return identify(handle.store.model, denoiser, handle.loras_of(denoiser), handle.architecture.name, dtype)
