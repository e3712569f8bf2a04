"""What a run begins with, before it samples.

MiniMax H3, LTX-2 and Anima refine text with layers of their own, and SenseNova makes keys and values of a prefix. They
do so in `extra_conds`, where ComfyUI prepares what `apply_model` is given, so a guard of that comes too late.

HiDream-O1 keeps keys and values of prompts on itself, from run to run. A run without a guard that overflowed has left
NaN there, which no precision cures. One with another precision or LoRA has left what this one would not compute.
Qwen-Image 2.1 keeps them for one run: of a run that goes on without its guard, some are the guard's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..precision.arch import detect
from ..precision.dtypes import FP16_MAX, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, OnFailure
from ..precision.observe import floating, non_finite
from ..precision.overflow import Clips, Extremes, only_minus_inf, places
from ..precision.snapshot import Snapshot
from ..precision.upcast import run_in_fp32
from ..trust.message import Message
from .calls import OPAQUE, ModelCall
from .compat import unless_changed
from .layers import products_in_fp32

_TEXT = "c_crossattn"  # of the conditions that a model prepares
_PREPARES = "preprocess_"  # how the methods of a network begin that are called then
Prepare = Callable[..., dict[str, Any]]  # ComfyUI's `extra_conds`: what a prompt holds, by name → conditions, by name


def refining_guarded(
    model: Any,
    policy: GuardPolicy,
    tell: Callable[[str], None],
    or_plain: Callable[[Callable[[], Any], Callable[[], Any]], Any] = lambda guarded, _plain: guarded(),
) -> Any:
    """The same BaseModel, with its state, which prepares conditions in fp32 where half precision does not hold them;
    the model itself where its network prepares none.

    tell: is told what was made again, and why.
    or_plain: `Run.or_plain`.
    The view raises GuardStopped, naming what is broken, where fp32 does not help, or the policy says stop.
    """
    if not any(name.startswith(_PREPARES) for name in dir(model.diffusion_model)):
        return model
    guarded, plain = _guarded(model.extra_conds, ModelCall(model, {}), policy, tell), model.extra_conds

    def extra_conds(**given: Any) -> dict[str, Any]:
        return or_plain(lambda: guarded(**given), lambda: plain(**given))

    kind = type(model)
    view = object.__new__(type(kind.__name__, (kind,), {"extra_conds": staticmethod(extra_conds)}))
    object.__setattr__(view, "__dict__", vars(model))  # so that nothing is set on the model, and all else is
    return view


def _guarded(prepare: Prepare, call: ModelCall, policy: GuardPolicy, tell: Callable[[str], None]) -> Prepare:
    def extra_conds(**given: Any) -> dict[str, Any]:
        dtype = dtype_name(call.dtype)
        clips, before = Clips(dtype), Snapshot(given, call.network, opaque=OPAQUE)
        made = clips.watched(prepare)(**given)
        broken = _broken(made)
        clipped = clips.take()
        saturated = clipped is not None and not clipped.item() < FP16_MAX
        if not (broken or saturated) or policy.on_failure is OnFailure.OFF or _broken(given):
            return made
        what, problem = broken or _TEXT, Message("NaN or infinite") if broken else Message("clipped")
        refiner = Message("The text refiner of {} itself", call.name)
        where = refiner if what == _TEXT else Message("What {} prepares itself ('{}')", call.name, what)
        found = Message("{}: its output in {} is {}", where, dtype, problem)
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
        tf32 = detect(given["device"]).tf32 and not policy.exact_fp32
        with products_in_fp32(call.network):
            again = run_in_fp32(prepare, tf32=tf32, **given)
        if broken and Extremes().learn(places(_tensors(made), dtype), _tensors(again)):
            return made  # a mask
        if not only_minus_inf(_tensors(again)):
            raise GuardStopped(
                "{}, and in fp32 too, from a prompt that is finite. Its weights may be damaged: download the "
                "checkpoint again, or try another prompt.",
                found,
            )
        refined = Message("text: {} in {}, refined again in fp32", problem, dtype)
        again_too = Message("{}: {} in {}, prepared again in fp32", what, problem, dtype)
        tell(refined if what == _TEXT else again_too)
        return again

    return extra_conds


def _broken(conditions: dict[str, Any]) -> str:
    """Return the name of the first condition that holds a non-finite value; "" where none does."""
    return next((name for name, value in conditions.items() if any(map(non_finite, _tensors(value)))), "")


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating tensors in a value, in whatever dicts, lists and objects it holds them."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (torch.nn.Module, type)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found += floating(each)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, (list, tuple)):
            left += each
        else:
            left += getattr(each, "__dict__", {}).values()
    return found


# --- earlier runs -----------------------------------------------------------------------------------------------------


@unless_changed("forgetting what a model keeps of earlier runs", None, kinds=(Exception,))
def forget_earlier_runs(model: Any) -> None:
    """Have a BaseModel's network forget by its own method, where it has one."""
    network: Any = ModelCall(model, {}).network
    if hasattr(network, "clear_kv_cache"):
        network.clear_kv_cache()
    qwen = network
    if hasattr(qwen, "reset_prefix_cache"):
        qwen.reset_prefix_cache(qwen.prefix_cache_enabled)
