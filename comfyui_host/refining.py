"""What a run begins with, before it samples.

MiniMax H3, LTX-2 and Anima refine text with layers of their own, and SenseNova makes keys and values of a prefix. They
do so in `extra_conds`, where ComfyUI prepares what `apply_model` is given, so a guard of that comes too late.

HiDream-O1 keeps keys and values of prompts on itself, from run to run, and Qwen-Image 2.1 those of a prefix in an
object. A run without a guard that overflowed has left NaN there, which no precision cures. One with another precision
or another LoRA has left what this one would not compute.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..precision.arch import detect
from ..precision.dtypes import FP16_MAX, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, OnFailure
from ..precision.observe import floating, non_finite
from ..precision.overflow import Clips, Extremes, only_minus_inf, places
from ..precision.snapshot import Path, Snapshot, reachable
from ..precision.upcast import run_in_fp32
from ..trust.message import Message
from .calls import OPAQUE, ModelCall
from .compat import unless_changed
from .layers import products_in_fp32

logger = logging.getLogger(__name__)

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


@unless_changed("forgetting what a model keeps of earlier runs", None)
def forget_earlier_runs(model: Any, _conditions: Any = None, patchers: Sequence[Any] = (), *_: Any) -> None:
    """Have a BaseModel's network forget by its own method, where it has one; and empty whatever else it keeps that
    holds NaN or +inf, which is no constant and no mask.

    patchers: of what is loaded with it: the same model on other GPUs, and what is no BaseModel, which stays as it is.
    """
    for each in (model, *(patcher.model for patcher in patchers if hasattr(patcher, "model"))):
        if hasattr(each, "diffusion_model"):
            _forget(ModelCall(each, {}).network)


def _forget(network: Any) -> None:
    if hasattr(network, "clear_kv_cache"):
        network.clear_kv_cache()
    emptied: set[Path] = set()
    while broken := _not_finite(network) - emptied:  # one tensor may be kept in several places
        for path in broken:
            logger.info("NaN Guard: forgot '%s', NaN or infinite since an earlier run", ".".join(map(str, path)))
            _empty(network, path)
        emptied |= broken


def _not_finite(network: torch.nn.Module) -> set[Path]:
    buffers = {id(buffer) for buffer in network.buffers()}
    tensors = [(path, each) for path, each in reachable(network, opaque=OPAQUE) if id(each) not in buffers]
    return {path for path, each in tensors if not only_minus_inf(each)}


def _empty(network: torch.nn.Module, path: Path) -> None:
    """Empty the outermost container that the last module on the path to a tensor keeps; where there is none, clear the
    attribute."""
    value: Any = network
    kept: list[tuple[Any, str, Any]] = []  # from the last module on: what holds it, as what, and itself
    for key in path:
        holder, value = value, _inside(value, key)
        kept = [] if isinstance(value, torch.nn.Module) else [*kept, (holder, str(key), value)]
    for holder, name, each in kept:
        if isinstance(each, (dict, list, set, deque)):
            each.clear()
            return
        if each is None or isinstance(each, (tuple, torch.Tensor)):
            object.__setattr__(holder, name, None)
            return


def _inside(value: Any, key: Any) -> Any:
    """What a path's next key gives; None where that has been emptied."""
    if not isinstance(value, (dict, list, tuple, deque)):
        return getattr(value, str(key), None)
    try:
        return value[key]
    except LookupError:
        return None
