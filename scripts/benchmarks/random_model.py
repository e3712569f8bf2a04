"""A denoiser built in memory, behind the interface of a model on disk: all code above it is what users run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from comfyui_onediff_guard.pipelines.compile.backends import choose_backend
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.models.on_disk import StoredModel, Weights
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.components import ComponentStore
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.guard import GuardPolicy
from comfyui_onediff_guard.precision.policy import Precision

Make = Callable[[torch.dtype], torch.nn.Module]


@dataclass(frozen=True)
class RandomModel(StoredModel):
    """A model with only a denoiser, which is built instead of read."""

    make: Make

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """Return the denoiser, on the device that `make` chooses."""
        if name != self.family.denoiser:
            raise KeyError(f"{self.name} has no '{name}', only '{self.family.denoiser}'")
        return self.make(dtype)

    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        return self.component(name, torch.float32).get_parameter(parameter[0]).detach()

    def unweighted(self, name: str) -> NoReturn:
        raise KeyError(f"{self.name} has no '{name}', only '{self.family.denoiser}'")


def store(name: str, family: FamilySpec, config: Any, make: Make, device: torch.device) -> ComponentStore:
    """Return a store of the model. config: the denoiser's."""
    model = RandomModel(
        path=Path(name),
        family=family,
        variant=VARIANTS[family.variant(config)],
        options={},
        weights={family.denoiser: Weights((), 0, {"BF16": 0})},
        configs={family.denoiser: config},
        denoiser_config=config,
        vae_config={},
        notes=("random weights",),
        make=make,
    )
    return ComponentStore(model, PlainPlacement(device))


def handle(
    components: ComponentStore, precision: Precision, backend: str, policy: GuardPolicy, offload: Offload = Offload.NONE
) -> PipelineHandle:
    """Return a pipeline. Raises BackendUnavailable."""
    device = components.placement.device
    return PipelineHandle(
        store=components,
        architecture=detect(device),
        precision=precision,
        backend=choose_backend(backend, device),
        offload=offload,
        policy=policy,
    )
