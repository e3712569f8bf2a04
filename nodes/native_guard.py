"""The guard for ComfyUI's own MODEL and VAE, and the numerics probe for its MODEL."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..comfyui_host import host
from ..comfyui_host.guarded_prompt import INSERTED
from ..trust.message import BadInput, Message
from . import inputs, pipeline_guard
from .node import Node
from .probe import PICTURE, TEXT, shown
from .stage_node import requested

logger = logging.getLogger(__name__)


class NaNGuardNative(Node):
    """MODEL, VAE or both → the same, guarded."""

    TITLE = "NaN Guard (native)"
    CATEGORY = inputs.NATIVE
    SEARCH_ALIASES = [*pipeline_guard.WORDS, "Flux", "SDXL", "SVD", "VAE decode"]
    DESCRIPTION = (
        "Guards any of ComfyUI's own models and VAEs (SD1.5, SDXL, Flux, SVD and others). A sampling step, encoding or "
        "decoding that is NaN or infinite (a black picture) is recomputed in fp32 from the same weights. Wire a model, "
        "a VAE or both through it. This node shows what it did."
    )
    RETURN_TYPES = ("MODEL", "VAE")
    RETURN_NAMES = ("model", "vae")
    OUTPUT_TOOLTIPS = (
        "The guarded model. Wire it to KSampler or any other node that takes a model.",
        "The guarded VAE. Wire it to VAE Decode, VAE Encode or any other node that takes a VAE.",
    )
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        model = (
            "From a loader, a LoRA or another node that changes the model. The input is not changed; the output is "
            "guarded."
        )
        vae = "From a loader. The input is not changed; the output is guarded."
        scope = (
            "step: recompute only what failed. run: the rest of the run is in fp32. learned: once fp16 fails, every "
            "layer has overflow protection from the next call on, also in later runs."
        )
        return {
            "required": {},  # ComfyUI 0.0.1 needs the key
            "optional": {
                "model": ("MODEL", {"tooltip": model}),
                "vae": ("VAE", {"tooltip": vae}),
                "on_failure": inputs.on_failure(),
                "exact_fp32": inputs.exact_fp32(),
                "scope": inputs.choice(inputs.NATIVE_SCOPES, scope, default="learned"),
                "precision": inputs.native_precision(),
                "profile": inputs.profile(wired=True),
            },
            "hidden": {**inputs.node_id(), "prompt": "PROMPT"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, profile: str | None = None) -> bool | str:
        return pipeline_guard.what_is_wrong_with(profile) or True

    def apply(
        self,
        model: Any = None,
        vae: Any = None,
        on_failure: str = "rerun",
        exact_fp32: bool = False,
        scope: str = "learned",
        precision: str = inputs.INHERIT,
        profile: str = "",
        node_id: str | None = None,
        prompt: Mapping[str, Any] | None = None,
    ) -> Any:
        from ..comfyui_host.native_guards import guarded_model, guarded_vae, is_guarded, or_unguarded
        from ..comfyui_host.runs import Settings
        from ..precision.guard import GuardPolicy, OnFailure, Scope
        from ..precision.machine import check_torch

        inserted = str(node_id).startswith(INSERTED)
        if not inserted:
            _check_wires({"model": model, "vae": vae}, node_id, prompt or {})
        try:
            if inserted and any(of is not None and is_guarded(of) for of in (model, vae)):
                return model, vae
            check_torch()  # no rerun works without it
            request, policy = requested(precision), GuardPolicy(OnFailure(on_failure), exact_fp32, Scope(scope))
            settings = Settings(policy, request, node_id, pipeline_guard.parsed(profile), inserted=inserted)
            for_vae = replace(settings, profile=None)
            return (
                host.blocked(_lacking("model")) if model is None else or_unguarded(guarded_model, model, settings),
                host.blocked(_lacking("vae")) if vae is None else or_unguarded(guarded_vae, vae, for_vae),
            )
        except Exception as error:
            if not inserted:
                raise
            logger.warning("Guard every workflow: node %s is not guarded: %s", node_id, error)
            return model, vae


class NumericsProbeModel(Node):
    """MODEL and KSampler's inputs → a picture of the largest values in every layer, and a recommendation."""

    TITLE = "Numerics Probe (MODEL)"
    CATEGORY = inputs.DIAGNOSE
    SEARCH_ALIASES = ["NaN", "overflow", "black image", *inputs.PRECISION_WORDS, "dynamic range", "heat map"]
    DESCRIPTION = (
        "Runs a few sampling steps of any of ComfyUI's own models in fp32, and draws every layer's largest values "
        "against the ranges of fp16 and bf16. Recommends a dtype for this model on this card. Wire it like a KSampler. "
        "Other runs are not changed or slowed down."
    )
    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("images", "recommendation", "profile")
    OUTPUT_TOOLTIPS = (
        PICTURE,
        TEXT,
        "Wire it to NaN Guard (native)'s profile, with scope learned. Empty unless overflow protection is recommended.",
    )
    OUTPUT_NODE = True
    EXPERIMENTAL = True  # its recommendations have not been tried on many cards and models yet
    FUNCTION = "probe"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        samplers, schedulers = host.samplers()
        cfg_tip = "As in KSampler. 1: no guidance, half the compute."
        latent_tip = (
            "As in KSampler: empty, or what to start from. Smaller is faster and reaches nearly the same values."
        )
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "From a loader, a LoRA or another node that changes the model."}),
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


def _lacking(name: str) -> Message:
    return Message("NaN Guard (native) has no {} to output: its input '{}' is not connected. Connect it.", name, name)


def _check_wires(given: Mapping[str, Any], node_id: str | None, prompt: Mapping[str, Any]) -> None:
    """Raise BadInput if nothing is wired to a guard, or a node takes an output whose input is not wired."""
    if all(of is None for of in given.values()):
        raise BadInput("NaN Guard (native) has no input. Connect a model, a VAE or both.")
    taken = [value for node in prompt.values() for value in node.get("inputs", {}).values()]
    for slot, (name, of) in enumerate(given.items()):
        if of is None and [node_id, slot] in taken:
            raise BadInput(_lacking(name))
