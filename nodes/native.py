"""The guard for ComfyUI's own MODEL and VAE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs

if TYPE_CHECKING:
    from ..precision.guard import GuardPolicy


class NaNGuardModel:
    """MODEL → the same MODEL, guarded."""

    CATEGORY = inputs.CATEGORY
    DESCRIPTION = (
        "Guards any of ComfyUI's own models (SD1.5, SDXL, Flux, SVD and others): a sampling step that comes out NaN or "
        "infinite is computed again in fp32 from the same weights. What it did is shown on this node while sampling."
    )
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "From a loader, a LoRA or another node that changes it. It stays as it is; what comes out is guarded."
        return {"required": {"model": ("MODEL", {"tooltip": tip}), **_policy_inputs()}, "hidden": inputs.node_id()}

    def apply(
        self, model: Any, on_failure: str, strict: bool, scope: str = "step", node_id: str | None = None
    ) -> tuple[Any]:
        from .comfy_models import guarded_model

        return (guarded_model(model, _policy(on_failure, strict, scope), node_id),)


class NaNGuardVAE:
    """VAE → the same VAE, guarded."""

    CATEGORY = inputs.CATEGORY
    DESCRIPTION = (
        "Guards any of ComfyUI's own VAEs: an encoding or decoding that comes out NaN or infinite (a black picture) is "
        "computed again in fp32 from the same weights, tile by tile. What it did is shown on this node."
    )
    RETURN_TYPES = ("VAE",)
    RETURN_NAMES = ("vae",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "From a loader. It stays as it is; what comes out is guarded."
        return {"required": {"vae": ("VAE", {"tooltip": tip}), **_policy_inputs()}, "hidden": inputs.node_id()}

    def apply(
        self, vae: Any, on_failure: str, strict: bool, scope: str = "step", node_id: str | None = None
    ) -> tuple[Any]:
        from .comfy_models import guarded_vae

        return (guarded_vae(vae, _policy(on_failure, strict, scope), node_id),)


def _policy_inputs() -> dict[str, Any]:
    return {
        "on_failure": inputs.on_failure(),
        "strict": inputs.strict(),
        "scope": inputs.choice(
            inputs.NATIVE_SCOPES, "step: rerun what failed alone. run: the rest of the run is in fp32."
        ),
    }


def _policy(on_failure: str, strict: bool, scope: str) -> GuardPolicy:
    from ..precision.guard import GuardPolicy, OnFailure, Scope

    return GuardPolicy(OnFailure(on_failure), strict, Scope(scope))
