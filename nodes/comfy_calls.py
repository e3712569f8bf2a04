"""One call of a ComfyUI MODEL, as its wrapper of `apply_model` sees it; and the same call again, in fp32.

ComfyUI keeps wrappers for each MODEL. Around `apply_model` inputs are not cast to half precision yet, and what other
packs wrap stays in the chain.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..pipelines.errors import BadInput
from ..precision.dtypes import DTYPES, dtype_name
from ..precision.guard import GuardStopped
from ..precision.observe import floating, non_finite
from ..precision.policy import Component, Plan
from .comfy_products import products_in_fp32

KEY = "onediff_guard"  # of our wrappers on a MODEL
ATTENTION_OVERRIDE = "optimized_attention_override"  # in transformer_options
TAKE_FP32 = {f"attention_{name}" for name in ("basic", "sub_quad", "split", "xformers", "pytorch")}
_INPUTS = {"x": "latents", "c_concat": "latents to start from", "c_crossattn": "a prompt"}


def wrapped(patcher: Any, wrappers: Mapping[str, Callable[..., Any]]) -> Any:
    """A clone of a MODEL (ComfyUI's ModelPatcher) with wrappers in place of those that we gave it before.

    wrappers: by kind: OUTER_SAMPLE, APPLY_MODEL.
    Raises BadInput where ComfyUI is too old to have them.
    """
    kinds: Any = getattr(sys.modules.get("comfy.patcher_extension"), "WrappersMP", None)
    if not hasattr(kinds, "APPLY_MODEL"):
        raise BadInput("This ComfyUI cannot wrap a MODEL's apply_model, which is needed here. Update ComfyUI.")
    clone = patcher.clone()
    for kind in ("OUTER_SAMPLE", "APPLY_MODEL"):
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
        """Of the model, for people."""
        return type(self.model.model_config).__name__

    @property
    def dtype(self) -> torch.dtype:
        """It computes in."""
        return self.model.manual_cast_dtype or self.model.get_dtype()

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
        options = transformer_options or {}
        memory = _Memory(options)
        more = {"timestep": t, "control": control, "transformer_options": options, "memory": memory}
        try:
            made = made_by(ModelCall(executor.class_obj, {"executor": executor, **given, **more}))
        except GuardStopped as stopped:
            for name, value in given.items():
                if broken := sum(map(non_finite, floating(value))):
                    what = _INPUTS.get(name, f"condition '{name}'")
                    raise GuardStopped(
                        f"The model was given {what} with {broken} non-finite values, so another node made them: "
                        "look at the nodes before the sampler, and at those that change the model."
                    ) from stopped
            raise
        memory.settle()
        return made

    return wrapper


def apply_model(
    *, executor: Any, x: Any, timestep: Any, c_concat: Any, c_crossattn: Any, control: Any, memory: _Memory, **more: Any
) -> Any:
    """Goes on with the chain. ControlNet's residuals are taken off their lists as they are used: off a copy, so that
    the call can be made again."""
    memory.rewind()
    options = more.pop("transformer_options")
    control = pytree.tree_map(lambda residual: residual, control)
    return executor(x, timestep, c_concat, c_crossattn, control, options, **more)


def apply_model_in_fp32(*, executor: Any, transformer_options: dict[str, Any], **call: Any) -> Any:
    options = {**transformer_options, ATTENTION_OVERRIDE: _attention_in_fp32}
    with products_in_fp32(executor.class_obj.diffusion_model):
        made = apply_model(executor=executor, transformer_options=options, **call)
    call["memory"].keep()
    return made


class _Memory:
    """What ComfyUI's EasyCache remembers of the steps before, by which it skips the model.

    It sits inside the guard. So each call for one step starts from the same, and the one that counts leaves its own:
    else a rerun, with the inputs of the attempt before it, would be skipped for what the attempt left.
    """

    def __init__(self, transformer_options: dict[str, Any]):
        self._holder = transformer_options.get("easycache")
        self._before = self._now()
        self._kept: dict[str, Any] | None = None

    def rewind(self) -> None:
        self._set(self._before)

    def keep(self) -> None:
        self._kept = self._now()

    def settle(self) -> None:
        if self._kept is not None:
            self._set(self._kept)

    def _now(self) -> dict[str, Any]:
        return _copied(vars(self._holder)) if self._holder else {}

    def _set(self, state: dict[str, Any]) -> None:
        if self._holder:
            vars(self._holder).update(_copied(state))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in state.items()}


def _attention_in_fp32(chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For the rerun: kernels for half precision alone (sage, flash, another pack's) give way to PyTorch's own."""
    if getattr(chosen, "__name__", "") not in TAKE_FP32:
        chosen = sys.modules["comfy.ldm.modules.attention"].attention_pytorch
    return chosen(*args, **kwargs)


def comfy_plan(component: Component, model: str, computes_in: torch.dtype) -> Plan:
    """Of a stage whose dtype ComfyUI chose. model: its name, for people. Raises BadInput where it is none of ours."""
    dtype = dtype_name(computes_in)
    if dtype not in DTYPES:
        raise BadInput(f"{model} computes in {dtype}. The NaN Guard and the Numerics Probe know {', '.join(DTYPES)}.")
    half = dtype != "fp32"
    return Plan(
        component=component,
        dtype=dtype,
        guarded=half,
        folded=False,
        accumulation="as it is",
        reason=f"{model} computes in {dtype} here, by ComfyUI's settings",
        source="ComfyUI",
        guard_reason="on: the NaN Guard's node" if half else "only watching: fp32 is what it would rerun in",
        fold_reason="ComfyUI's models are not folded",
        accumulation_reason="ComfyUI's own",
        accumulation_source="ComfyUI",
    )
