"""What runs taught about a pipeline's denoiser: in its store for this process, in a profile for later ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from ..precision.learned import NOTHING, Learned
from .errors import BadProfile
from .handle import PipelineHandle
from .profiles import Profile, identify, read, write

logger = logging.getLogger(__name__)


def recall(handle: PipelineHandle, dtype: str, parts: Iterable[str]) -> tuple[Learned, tuple[str, ...]]:
    """What is known, and lines for the report: what a profile brought, or why it was left alone.

    parts: of the denoiser, those that may run in fp32.
    """
    key = handle.memory_key(dtype)
    if key in handle.store.learned:
        return handle.store.learned[key], ()
    learned, notes = _from_profile(handle, dtype, parts)
    handle.store.learned[key] = learned
    if handle.profile is None and learned != NOTHING:
        handle.store.recalled.add(key)
    return learned, notes


def remember(handle: PipelineHandle, dtype: str, learned: Learned) -> None:
    """What is known from now on, for as long as the store lives. That a run went on in fp32 is of that run alone."""
    handle.store.learned[handle.memory_key(dtype)] = replace(learned, whole_run_fp32=False)


def keep(handle: PipelineHandle, dtype: str) -> None:
    """Write what is known to a profile, unless the given one or the kept one says it. A disk that refuses is logged.

    Nothing is written too, where runs forgot what the kept profile says.
    """
    key = handle.memory_key(dtype)
    learned = handle.store.learned.get(key, NOTHING).to_share
    if handle.profiles is None or (learned == NOTHING and key not in handle.store.recalled):
        return
    profile = replace(here(handle, dtype), learned=learned)
    try:
        if not _is_given(handle, profile) and not _is_kept(handle, profile):
            logger.info("keeping a profile: %s", write(handle.profiles, profile))
    except OSError as error:
        logger.warning("The profile %s could not be kept in %s: %s", profile.name, handle.profiles, error)


def _from_profile(handle: PipelineHandle, dtype: str, parts: Iterable[str]) -> tuple[Learned, tuple[str, ...]]:
    run = here(handle, dtype)
    try:
        found = handle.profile or _on_disk(handle, run)
    except BadProfile as error:
        return NOTHING, (str(error),)
    if found is None:
        return NOTHING, ()
    if misfit := found.misfit(run, parts):
        return NOTHING, (f"{_named(handle, dtype)} is left alone: {misfit}",)
    return found.learned, (f"from a profile: {found.in_words()}",)


def _named(handle: PipelineHandle, dtype: str) -> str:
    return "the profile that was given" if handle.profile else f"the profile {here(handle, dtype).name}"


def here(handle: PipelineHandle, dtype: str) -> Profile:
    """The profile of a pipeline of which nothing is known yet."""
    return identify(handle.store.model, handle.loras, handle.architecture.name, dtype)


def _is_given(handle: PipelineHandle, profile: Profile) -> bool:
    given, known = handle.profile, profile.learned
    return given is not None and given.learned == known and not given.misfit(profile, known.parts)


def _is_kept(handle: PipelineHandle, profile: Profile) -> bool:
    try:
        return _on_disk(handle, profile) == profile
    except BadProfile:
        return False


def _on_disk(handle: PipelineHandle, profile: Profile) -> Profile | None:
    file = handle.profiles and handle.profiles / f"{profile.name}.json"
    return read(file) if file and file.is_file() else None
