"""One call of a ComfyUI MODEL, as its wrapper of `apply_model` sees it; and the same call again, in fp32.

ComfyUI keeps wrappers for each MODEL. Around `apply_model` inputs are not cast to half precision yet, and what other
packs wrap stays in the chain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision import shared
from ..precision.guard import GuardStopped
from ..precision.observe import floating, non_finite
from ..trust.message import BadInput
from .memory import CallMemory
from .products import products_in_fp32
from .weights import loaded_anew, weights_as_stored

KEY = "onediff_guard"  # of our wrappers on a MODEL
_KINDS = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")
ATTENTION_OVERRIDE = "optimized_attention_override"  # in transformer_options
TAKE_FP32 = {f"attention_{name}" for name in ("basic", "sub_quad", "split", "xformers", "pytorch")}
_INPUTS = {"x": "latents", "c_concat": "latents to start from", "c_crossattn": "a prompt"}


def _outside_of_allocation_graphs() -> AbstractContextManager[object]:
    """Inside, ComfyUI does not record what is allocated (since 0.35): it frees that with the block that is computed."""
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", nullcontext)
    return pause()


shared.lasting = _outside_of_allocation_graphs


def wrapped(patcher: Any, wrappers: Mapping[str, Callable[..., Any]]) -> Any:
    """A clone of a MODEL (ComfyUI's ModelPatcher) with wrappers in place of those that we gave it before.

    wrappers: by kind, of _KINDS.
    Raises BadInput where ComfyUI is too old to have them.
    """
    kinds: Any = getattr(sys.modules.get("comfy.patcher_extension"), "WrappersMP", None)
    if not hasattr(kinds, "APPLY_MODEL"):
        raise BadInput("This ComfyUI cannot wrap a MODEL's apply_model, which is needed here. Update ComfyUI.")
    clone = patcher.clone()
    for kind in _KINDS:
        clone.remove_wrappers_with_key(getattr(kinds, kind), KEY)
    for kind, wrapper in wrappers.items():
        clone.add_wrapper_with_key(getattr(kinds, kind), KEY, wrapper)
    return clone


@dataclass(frozen=True)
class ModelCall:
    """model: ComfyUI's BaseModel. arguments: by name, for `apply_model` and `apply_model_in_fp32`."""

    model: Any
    arguments: dict[str, Any]

    @property
    def network(self) -> torch.nn.Module:
        compiled = self.model.diffusion_model
        return getattr(compiled, "_orig_mod", compiled)

    @property
    def name(self) -> str:
        """The name of the model, for people."""
        return type(self.model.model_config).__name__

    @property
    def dtype(self) -> torch.dtype:
        """It computes in."""
        return self.model.manual_cast_dtype or self.model.get_dtype()

    @property
    def patched(self) -> frozenset[str]:
        """Names of the network's weights that LoRAs and their kind change, in memory or as they go."""
        patches = getattr(getattr(self.model, "current_patcher", None), "patches", {})
        return frozenset(str(name).removeprefix("diffusion_model.") for name in patches)

    @property
    def device(self) -> torch.device:
        return self.arguments["x"].device


def around_apply_model(made_by: Callable[[ModelCall], Any]) -> Callable[..., Any]:
    """A wrapper of `apply_model`, of kind APPLY_MODEL, in which `made_by` makes the denoised latents."""

    def wrapper(
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: torch.Tensor | None = None,
        c_crossattn: torch.Tensor | None = None,
        control: dict[str, Any] | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conditions: Any,
    ) -> Any:
        """executor: goes on with the chain, and ends in ComfyUI itself. x: noisy latents, float32. t: sigma."""
        given = {"x": x, "c_concat": c_concat, "c_crossattn": c_crossattn, **conditions}
        call = ModelCall(executor.class_obj, {"executor": executor, **given, "timestep": t, "control": control})
        memory = CallMemory(call.network, transformer_options or {}, call.dtype, (given, t, control))
        call.arguments["memory"] = memory
        with memory.settled():
            try:
                return made_by(call)
            except GuardStopped as stopped:
                if broken := _broken(given):
                    raise GuardStopped(
                        "The model was given {} non-finite values, so another node made them: look at the nodes "
                        "before the sampler, and at those that change the model.",
                        broken,
                    ) from stopped
                raise

    return wrapper


def _broken(given: Mapping[str, Any]) -> str:
    """ "latents with 3", of the first that is not finite; "" where all are."""
    for name, value in given.items():
        if broken := sum(map(non_finite, floating(value))):
            what = _INPUTS.get(name, f"condition '{name}'")
            return f"{what} with {broken}"
    return ""


def apply_model(
    *,
    executor: Any,
    x: Any,
    timestep: Any,
    c_concat: Any,
    c_crossattn: Any,
    control: Any,
    memory: CallMemory,
    options: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Any:
    """Goes on with the chain. ControlNet's residuals are taken off their lists as they are used: off a copy, so that
    the call can be made again. options: beside those that ComfyUI gave."""
    control = pytree.tree_map(lambda residual: residual, control)
    return executor(x, timestep, c_concat, c_crossattn, control, memory.of_a_call(options), **more)


def apply_model_in_full(*, executor: Any, **call: Any) -> Any:
    """From the weights as they are stored, by layers and kernels that take float32."""
    with products_in_fp32(executor.class_obj.diffusion_model), weights_as_stored():
        return apply_model(executor=executor, options={ATTENTION_OVERRIDE: _attention_in_fp32}, **call)


def apply_model_in_fp32(*, memory: CallMemory, **call: Any) -> Any:
    made = apply_model_in_full(memory=memory, **call)
    memory.keep()
    return made


def load_anew(*, executor: Any, timestep: Any, control: Any, memory: CallMemory, **given: Any) -> bool:
    """Have ComfyUI load the model's weights once more; says whether it did. Not where its inputs are to blame."""
    memory.forget()
    if _broken(given) or not loaded_anew(executor.class_obj):
        return False
    memory.renewed()
    return True


def _attention_in_fp32(chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Kernels for half precision alone (sage, flash, another pack's) give way to PyTorch's own."""
    if getattr(chosen, "__name__", "") not in TAKE_FP32:
        chosen = sys.modules["comfy.ldm.modules.attention"].attention_pytorch
    return chosen(*args, **kwargs)
