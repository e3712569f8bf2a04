"""State of a run from before it samples: prepared conditions, and caches of earlier runs.

MiniMax H3, LTX-2 and Anima refine text with layers of their own, and SenseNova computes keys and values of a prefix.
They do so in `extra_conds`, where ComfyUI prepares the arguments of `apply_model`: a guard of that is too late.

HiDream-O1 keeps keys and values of prompts on its network, from run to run. An unguarded run that overflowed has left
NaN there, which no precision cures. A run with another precision or LoRA has left values that are wrong for this one.
Qwen-Image 2.1 keeps them for one run: if the run goes on without its guard, some are the guard's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..precision.arch import detect
from ..precision.dtypes import FP16_MAX, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, OnFailure
from ..precision.layer_peaks import floating, non_finite
from ..precision.overflow_detection import ClipDetector, KnownRangeEnds, only_minus_inf, range_ends
from ..precision.snapshot import Snapshot
from ..precision.upcast import run_in_fp32
from ..trust.message import Message
from .compat import unless_changed
from .model_calls import OPAQUE, ModelCall
from .rerun_layers import products_in_fp32

_TEXT = "c_crossattn"  # the text, among the prepared conditions
_PREPARES = "preprocess_"  # prefix of the network's methods that `extra_conds` calls
Prepare = Callable[..., dict[str, Any]]  # ComfyUI's `extra_conds`: a prompt's entries by name → conditions by name


def refining_guarded(
    model: Any,
    policy: GuardPolicy,
    tell: Callable[[str], None],
    or_plain: Callable[[Callable[[], Any], Callable[[], Any]], Any] = lambda guarded, _plain: guarded(),
) -> Any:
    """Return a view of a BaseModel, with the same state, that prepares conditions in fp32 if they overflow in half
    precision; the model itself if its network prepares none.

    tell: called with a line on each condition that was recomputed.
    or_plain: `Run.or_plain`.
    The view raises GuardStopped, which names the condition, if fp32 does not help or the policy is to stop.
    """
    if not any(name.startswith(_PREPARES) for name in dir(model.diffusion_model)):
        return model
    guarded, plain = _guarded(model.extra_conds, ModelCall(model, {}), policy, tell), model.extra_conds

    def extra_conds(**given: Any) -> dict[str, Any]:
        return or_plain(lambda: guarded(**given), lambda: plain(**given))

    kind = type(model)
    view = object.__new__(type(kind.__name__, (kind,), {"extra_conds": staticmethod(extra_conds)}))
    object.__setattr__(view, "__dict__", vars(model))  # shared; `extra_conds` is not set on the model
    return view


def _guarded(prepare: Prepare, call: ModelCall, policy: GuardPolicy, tell: Callable[[str], None]) -> Prepare:
    def extra_conds(**given: Any) -> dict[str, Any]:
        dtype = dtype_name(call.dtype)
        clips, before = ClipDetector(dtype), Snapshot(given, call.network, opaque=OPAQUE)
        made = clips.wrap(prepare)(**given)
        broken = _broken(made)
        clipped = clips.take()
        saturated = clipped is not None and not clipped.item() < FP16_MAX
        if not (broken or saturated) or policy.on_failure is OnFailure.OFF or _broken(given):
            return made
        what, problem = broken or _TEXT, Message("NaN or infinite") if broken else Message("clipped")
        refiner = Message("Text refiner of {}", call.name)
        where = refiner if what == _TEXT else Message("{}, computing its input '{}'", call.name, what)
        found = Message("{}: its output in {} is {}", where, dtype, problem)
        if policy.on_failure is OnFailure.STOP:
            raise GuardStopped(
                "{}, and the guard is set to 'stop'. Set the NaN Guard's on_failure to 'rerun' to recompute it in "
                "fp32.",
                found,
            )
        if lost := before.restore():
            raise GuardStopped(
                "{}, and it has overwritten '{}', which was too large to copy first, so it cannot be recomputed. "
                "Try another prompt.",
                found,
                lost,
            )
        tf32 = detect(given["device"]).tf32 and not policy.exact_fp32
        with products_in_fp32(call.network):
            again = run_in_fp32(prepare, tf32=tf32, **given)
        if broken and KnownRangeEnds().learn(range_ends(_tensors(made), dtype), _tensors(again)):
            return made  # an attention mask
        if not only_minus_inf(_tensors(again)):
            raise GuardStopped(
                "{}, and in fp32 too, although the prompt is finite. The weights may be damaged: download the "
                "checkpoint again, or try another prompt.",
                found,
            )
        refined = Message("text: {} in {}, recomputed in fp32", problem, dtype)
        again_too = Message("{}: {} in {}, recomputed in fp32", what, problem, dtype)
        tell(refined if what == _TEXT else again_too)
        return again

    return extra_conds


def _broken(conditions: dict[str, Any]) -> str:
    """Return the name of the first condition that holds a non-finite value; "" if none does."""
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


@unless_changed("clearing a model's caches of earlier runs", None, kinds=(Exception,))
def forget_earlier_runs(model: Any) -> None:
    """Clear the caches of a BaseModel's network by the network's own methods, if it has any."""
    network: Any = ModelCall(model, {}).network
    if hasattr(network, "clear_kv_cache"):
        network.clear_kv_cache()
    qwen = network
    if hasattr(qwen, "reset_prefix_cache"):
        qwen.reset_prefix_cache(qwen.prefix_cache_enabled)
