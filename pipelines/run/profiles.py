"""The precision overrides of a pipeline's runs: in its store for this process, in a profile
(`precision/overrides.py`) for later ones.

A profile belongs to a model by its denoiser's config, safetensors headers, sizes and a sample of the weights: not by a
hash of 11 GB, and headers alone would not tell a fine-tune from its base.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.overrides import NOTHING, PrecisionOverrides, Profile, ProfileFile
from ...trust.text import shown
from ..models.on_disk import StoredModel, header_text

if TYPE_CHECKING:
    from ..models.lora import Lora
    from ..weights.components import MemoryKey
    from .handle import PipelineHandle

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file's weights


def load_profile(handle: PipelineHandle, key: MemoryKey) -> tuple[PrecisionOverrides, tuple[str, ...]]:
    """What is known of a denoiser, and lines for the report."""
    if key in handle.store.learned:
        return handle.store.learned[key], ()
    learned, notes = _profile_file(handle, key).load()
    handle.store.learned[key] = learned
    if handle.profile is None and learned != NOTHING:
        handle.store.recalled.add(key)
    return learned, notes


def update_cache(handle: PipelineHandle, key: MemoryKey, learned: PrecisionOverrides) -> None:
    """What is known from now on, for as long as the store lives. That a run went on in fp32 is of that run alone."""
    handle.store.learned[key] = replace(learned, whole_run_fp32=False)


def save_profile(handle: PipelineHandle, key: MemoryKey) -> None:
    """Write what is known to a profile. Nothing is written too, where runs forgot what the kept profile says. Of ranks,
    the first one writes it for all."""
    if not handle.ranks.first:
        return
    learned = handle.store.learned.get(key, NOTHING)
    if learned.to_share != NOTHING or key in handle.store.recalled:
        _profile_file(handle, key).save(learned)


def _profile_file(handle: PipelineHandle, key: MemoryKey) -> ProfileFile:
    return ProfileFile(_identity(handle, key), handle.profiles, handle.profile)


def profile_of(handle: PipelineHandle, denoiser: str, dtype: str) -> Profile:
    """The profile of a denoiser of which nothing is known yet."""
    return _identity(handle, handle.memory_key(denoiser, dtype))


def _identity(handle: PipelineHandle, key: MemoryKey) -> Profile:
    """Read files when it is first asked for, as a run begins: at its end they may be gone, or others."""
    profiles, (denoiser, dtype, _, architecture, _) = handle.store.profiles, key
    if (whose := key[:4]) not in profiles:
        profiles[whose] = identify(handle.store.model, denoiser, handle.loras_of(denoiser), architecture, dtype)
    return profiles[whose]


def identify(model: StoredModel, denoiser: str, loras: Sequence[Lora], architecture: str, dtype: str) -> Profile:
    """The profile of a run of which nothing is known yet. denoiser: the component, which the LoRAs are added to."""
    import diffusers
    import torch

    versions = {package.__name__: ".".join(package.__version__.split(".")[:2]) for package in (torch, diffusers)}
    return Profile(
        model=shown(model.name, 300),
        weights=fingerprint(model.weights[denoiser].files, model.denoiser_config),
        loras=tuple(f"{fingerprint([lora.path], lora.beside)} at {lora.scale:g}" for lora in loras if lora.scale),
        architecture=architecture,
        dtype=dtype,
        versions=versions,
    )


def fingerprint(files: Iterable[Path], config: Mapping[str, Any] | None = None) -> str:
    """Return 32 hexadecimal digits that tell safetensors files, and a config, from others."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        size = file.stat().st_size
        header = header_text(file)
        digest.update(struct.pack("<Q", len(header)) + header)
        start = 8 + len(header)
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
        digest.update(f":{size};".encode())
    return digest.hexdigest()[:32]
