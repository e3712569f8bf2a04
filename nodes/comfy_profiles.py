"""The profile of one of ComfyUI's own models: what runs under its guard taught, kept for later ones."""

from __future__ import annotations

import hashlib

import torch

from ..pipelines.memory import KeptProfile
from ..pipelines.profiles import Profile
from ..precision.arch import Architecture
from ..precision.policy import Component
from ..trust.text import shown
from . import host

_SAMPLES, _VALUES = 64, 256  # weights that are read, and values of each


def profile_of(
    model: str, network: torch.nn.Module, component: Component, architecture: Architecture, dtype: str
) -> Profile:
    """Of which nothing is known yet. model: its name, for people."""
    full = {"torch": torch.__version__, "comfyui": host.version() or "none"}
    versions = {package: ".".join(version.split(".")[:2]) for package, version in full.items()}
    name = model if component is Component.DENOISER else f"{model}, {component.words}"
    return Profile(shown(name, 300), _fingerprint(network, component), (), architecture.name, dtype, versions)


def kept_profile(of: Profile, given: Profile | None) -> KeptProfile:
    """Among those that ComfyUI's user folder holds."""
    return KeptProfile(of, host.profiles_directory(), given)


def _fingerprint(network: torch.nn.Module, component: Component) -> str:
    """Of its structure, and of a sample of its vectors, which no LoRA changes and which are not quantised.

    A profile that were another model's would cost time, and make no picture wrong.
    """
    digest = hashlib.sha256(component.value.encode())
    vectors: list[torch.Tensor] = []
    for name, weight in network.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)};".encode())
        if weight.ndim == 1 and weight.is_floating_point() and not weight.is_meta:
            vectors.append(weight)
    for vector in vectors[:: max(1, len(vectors) // _SAMPLES)]:
        digest.update(vector.detach()[:_VALUES].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
