"""The guard and the numerics probe for ComfyUI's own MODEL, and the guard for its VAE."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.guarded_prompt import INSERTED
from ..trust.message import Message
from . import guard, inputs
from .node import Node
from .probe import PICTURE, TEXT, shown

if TYPE_CHECKING:
    from ..comfyui_host.runs import Settings


logger = logging.getLogger(__name__)


class NaNGuardModel(Node):
    """MODEL → the same MODEL, guarded."""

    TITLE = "NaN Guard (MODEL)"
    CATEGORY = inputs.NATIVE
    SEARCH_ALIASES = [*guard.WORDS, "Flux", "SDXL", "SVD"]
    DESCRIPTION = (
        "Guards any of ComfyUI's own models (SD1.5, SDXL, Flux, SVD and others): a sampling step that comes out NaN or "
        "infinite is computed again in fp32 from the same weights. What it did is shown on this node while sampling."
    )
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The guarded model. Wire it to KSampler or any other node that takes a model.",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "From a loader, a LoRA or another node that changes it. It stays as it is; what comes out is guarded."
        further = {"precision": inputs.native_precision(), "profile": inputs.profile(wired=True)}
        required = {"model": ("MODEL", {"tooltip": tip}), **_policy_inputs()}
        return {"required": required, "optional": further, "hidden": inputs.node_id()}

    @classmethod
    def VALIDATE_INPUTS(cls, profile: str | None = None) -> bool | str:
        return guard.what_is_wrong_with(profile) or True

    def apply(self, model: Any, *policy: Any, **further: Any) -> Any:
        from ..comfyui_host.guards import guarded_model

        return _guarded(guarded_model, model, *policy, **further)


class NaNGuardVAE(Node):
    """VAE → the same VAE, guarded."""

    TITLE = "NaN Guard (VAE)"
    CATEGORY = inputs.NATIVE
    SEARCH_ALIASES = [*guard.WORDS, "VAE decode"]
    DESCRIPTION = (
        "Guards any of ComfyUI's own VAEs: an encoding or decoding that comes out NaN or infinite (a black picture) is "
        "computed again in fp32 from the same weights, tile by tile. What it did is shown on this node."
    )
    RETURN_TYPES = ("VAE",)
    RETURN_NAMES = ("vae",)
    OUTPUT_TOOLTIPS = ("The guarded VAE. Wire it to VAE Decode, VAE Encode or any other node that takes a VAE.",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "From a loader. It stays as it is; what comes out is guarded."
        required = {"vae": ("VAE", {"tooltip": tip}), **_policy_inputs()}
        return {"required": required, "optional": {"precision": inputs.native_precision()}, "hidden": inputs.node_id()}

    def apply(self, vae: Any, *policy: Any, **further: Any) -> Any:
        from ..comfyui_host.guards import guarded_vae

        return _guarded(guarded_vae, vae, *policy, **further)


class NumericsProbeModel(Node):
    """MODEL and what KSampler takes → a picture of what every layer reaches, and a recommendation."""

    TITLE = "Numerics Probe (MODEL)"
    CATEGORY = inputs.DIAGNOSE
    SEARCH_ALIASES = ["NaN", "overflow", "black image", *inputs.PRECISION_WORDS, "dynamic range", "heat map"]
    DESCRIPTION = (
        "Runs a few sampling steps of any of ComfyUI's own models in fp32, measures what every layer reaches, draws it "
        "against the ranges of fp16 and bf16, and recommends a dtype for this model on this card. Wire it as a "
        "KSampler. Nothing else is changed or slowed down by it."
    )
    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("images", "recommendation", "profile")
    OUTPUT_TOOLTIPS = (
        PICTURE,
        TEXT,
        "Wire it to NaN Guard (MODEL)'s profile, with scope learned. Empty where nothing has to be wide.",
    )
    OUTPUT_NODE = True
    EXPERIMENTAL = True  # its recommendations have not been tried on many cards and models yet
    FUNCTION = "probe"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        samplers, schedulers = host.samplers()
        cfg_tip = "As in KSampler. 1: off, half the work."
        latent_tip = (
            "As in KSampler: an empty one, or what to start from. Smaller is faster, and reaches much the same."
        )
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "From a loader, a LoRA or another node that changes it."}),
                "positive": ("CONDITIONING", {"tooltip": "As in KSampler."}),
                "negative": ("CONDITIONING", {"tooltip": "As in KSampler."}),
                "latent_image": ("LATENT", {"tooltip": latent_tip}),
                "steps": inputs.integer(4, 1, 1000, 1, inputs.PROBED_STEPS),
                "cfg": inputs.number(7.0, 0.0, 100.0, 0.1, cfg_tip),
                "sampler_name": inputs.choice(samplers, "As in KSampler."),
                "scheduler": inputs.choice(schedulers, "As in KSampler."),
                "seed": inputs.seed(),
            },
            "hidden": inputs.node_id(),
        }

    def probe(
        self,
        model: Any,
        positive: list[Any],
        negative: list[Any],
        latent_image: dict[str, Any],
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        seed: int,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..comfyui_host.probe import KSampling, probe_model
        from ..precision.machine import check_torch

        check_torch()
        progress = host.Progress(steps, node_id)

        def step_done(done: int) -> None:
            progress.update(done, Message("step {}/{}, measured in fp32", done, steps))

        with progress:
            sampling = KSampling(steps, cfg, sampler_name, scheduler, seed)
            found = probe_model(model, positive, negative, latent_image, sampling, step_done)
        return shown(found, found.text(), node_id, found.profile_text)


def _policy_inputs() -> dict[str, Any]:
    return {
        "on_failure": inputs.on_failure(),
        "strict": inputs.strict(),
        "scope": inputs.choice(
            inputs.NATIVE_SCOPES,
            "step: rerun what failed alone. run: the rest of the run is in fp32. learned: where fp16 failed, every "
            "layer is wide from the next call on, in later runs too: its products in fp16, all else in float32.",
            default="learned",
        ),
    }


def _guarded(guard: Callable[[Any, Settings], Any], of: Any, *policy: Any, **further: Any) -> Any:
    """What a node puts out: a guarded MODEL or VAE. A guard that 'Guard every workflow' inserted leaves it as it is
    where it has one already, or can have none."""
    from ..comfyui_host.guards import is_guarded

    if not str(further.get("node_id")).startswith(INSERTED):
        return (guard(of, _settings(*policy, **further)),)
    try:
        if is_guarded(of):
            return (of,)
        settings = replace(_settings(*policy, **further), inserted=True)
        return {"ui": {"onediff_guard": [settings.history]}, "result": (guard(of, settings),)}
    except Exception as error:  # noqa: BLE001 - the run is somebody else's
        logger.warning("Guard every workflow: %s stays unguarded: %s", type(of).__name__, error)
        return (of,)


def _settings(
    on_failure: str,
    strict: bool,
    scope: str = "learned",
    precision: str = inputs.INHERIT,
    profile: str = "",
    node_id: str | None = None,
) -> Settings:
    """Collect a guard's inputs. Raises TorchTooOld where no rerun would work, and BadProfile."""
    from ..comfyui_host.runs import Settings
    from ..precision.guard import GuardPolicy, OnFailure, Scope
    from ..precision.machine import check_torch
    from ..precision.policy import Precision

    check_torch()
    request = None if precision == inputs.INHERIT else Precision(precision)
    policy = GuardPolicy(OnFailure(on_failure), strict, Scope(scope))
    return Settings(policy, request, node_id, guard.parsed(profile))
