"""The profile of one of ComfyUI's own models: what runs under its guard taught, kept for later ones."""

from __future__ import annotations

import hashlib

import torch

from ..precision.arch import Architecture
from ..precision.policy import Component
from ..precision.profile_store import Profile, ProfileFile
from ..trust.text import shown
from . import host
from .networks import ComfyNetwork

_VALUES = 16  # of each weight


def profile_of(of: ComfyNetwork, architecture: Architecture, dtype: str) -> Profile:
    """The profile of a network of which nothing is known yet."""
    full = {"torch": torch.__version__, "comfyui": host.version() or "none"}
    versions = {package: ".".join(version.split(".")[:2]) for package, version in full.items()}
    name = of.model if of.component is Component.DENOISER else f"{of.model}, {of.component.words}"
    return Profile(shown(name, 300), _fingerprint(of), (), architecture.name, dtype, versions)


def kept_profile(of: Profile, given: Profile | None) -> ProfileFile:
    """Among those that ComfyUI's user folder holds."""
    return ProfileFile(of, host.profiles_directory(), given)


def _fingerprint(of: ComfyNetwork) -> str:
    """A fingerprint of the structure, and of a few values of each weight: not of quantised ones, nor of those that
    LoRAs change, which are what they were or not, as there is room. So a model with LoRAs is another one than without.
    """
    digest = hashlib.sha256(of.component.value.encode())
    sampled: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, weight in of.network.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {name in of.patched};".encode())
        if type(weight.data) is torch.Tensor and not weight.is_meta and name not in of.patched:
            sampled.setdefault(weight.device, {})[name] = weight.detach().flatten()[:_VALUES].float()
    values: dict[str, bytes] = {}
    for here in sampled.values():
        parts = torch.cat([*here.values()]).cpu().split([*map(len, here.values())])
        values |= {name: part.numpy().tobytes() for name, part in zip(here, parts, strict=True)}
    for name in sorted(values):
        digest.update(values[name])
    return digest.hexdigest()[:32]
