"""Text that a model refines with layers of its own once a run, before it samples: MiniMax H3 and LTX-2.

They do so in `extra_conds`, where ComfyUI prepares what `apply_model` is given, so a guard of that comes too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..precision.arch import detect
from ..precision.clips import Clips
from ..precision.dtypes import FP16_MAX, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, OnFailure
from ..precision.observe import floating, non_finite
from ..precision.snapshot import Snapshot
from ..precision.upcast import run_in_fp32
from ..trust.message import Message
from .calls import ModelCall
from .memory import OPAQUE
from .products import products_in_fp32

_TEXT = "c_crossattn"  # of the conditions that a model prepares
Prepare = Callable[..., dict[str, Any]]  # ComfyUI's `extra_conds`: what a prompt holds, by name → conditions, by name


def refining_guarded(model: Any, policy: GuardPolicy, tell: Callable[[str], None]) -> Any:
    """The same BaseModel, with its state, whose text is refined in fp32 where half precision does not hold it; the
    model itself where it refines none.

    tell: is told what was made again, and why.
    The view raises GuardStopped, naming the refiner, where fp32 does not help, or the policy says stop.
    """
    if not hasattr(model.diffusion_model, "preprocess_text_embeds"):
        return model
    guarded = _guarded(model.extra_conds, ModelCall(model, {}), policy, tell)
    kind = type(model)
    view = object.__new__(type(kind.__name__, (kind,), {"extra_conds": staticmethod(guarded)}))
    object.__setattr__(view, "__dict__", vars(model))  # so that nothing is set on the model, and all else is
    return view


def _guarded(prepare: Prepare, model: ModelCall, policy: GuardPolicy, tell: Callable[[str], None]) -> Prepare:
    def extra_conds(**given: Any) -> dict[str, Any]:
        dtype = dtype_name(model.dtype)
        clips, before = Clips(dtype), Snapshot(given, model.network, opaque=OPAQUE)
        made = clips.watched(prepare)(**given)
        problem = _problem(made, clips.take())
        if not problem or policy.on_failure is OnFailure.OFF or _broken(given.get("cross_attn")):
            return made
        found = Message("The text refiner of {} itself: its output in {} is {}", model.name, dtype, problem)
        if policy.on_failure is OnFailure.STOP:
            raise GuardStopped(
                "{}, and the guard is set to stop. Set the NaN Guard's on_failure to 'rerun' to have such text "
                "refined in fp32.",
                found,
            )
        if lost := before.restore():
            raise GuardStopped(
                "{}, and it has overwritten '{}', which is too large to be copied beforehand.", found, lost
            )
        tf32 = detect(given["device"]).tf32 and not policy.strict
        with products_in_fp32(model.network):
            again = run_in_fp32(prepare, tf32=tf32, **given)
        if _broken(_text(again)):
            raise GuardStopped(
                "{}, and in fp32 too, from a prompt that is finite. Its weights may be damaged: download the "
                "checkpoint again, or try another prompt.",
                found,
            )
        tell(Message("text: {} in {}, refined again in fp32", problem, dtype))
        return again

    return extra_conds


def _problem(made: dict[str, Any], clipped: torch.Tensor | None) -> str:
    if _broken(_text(made)):
        return "non-finite"
    return "saturated" if clipped is not None and not clipped.item() < FP16_MAX else ""


def _text(conditions: dict[str, Any]) -> Any:
    return getattr(conditions.get(_TEXT), "cond", None)


def _broken(value: Any) -> bool:
    return any(map(non_finite, floating(value)))
