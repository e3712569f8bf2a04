"""One call of a ComfyUI MODEL: its `apply_model` wrapper, its fp32 rerun, and the state that networks and caches keep.

ComfyUI stores wrappers per MODEL. The inputs of `apply_model` are not cast to half precision yet, and other packs'
wrappers stay in the chain.

EasyCache skips the model by what it recorded in earlier steps; Wan's autoregressive sampler and Wan-Animate 2 keep
keys, values and activations in `transformer_options`; HiDream-O1 keeps them on its network, from one run to the next. A
failed call has already written to this state, so it is restored before the rerun.
"""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from types import CellType, MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision import process_state
from ..precision.dtypes import HALF_DTYPES
from ..precision.guard import GuardStopped
from ..precision.layer_peaks import floating, non_finite
from ..precision.planned_products import PlanMismatch, rollback_point
from ..precision.scaled_products import dtype_of_products
from ..precision.snapshot import Snapshot
from ..trust.message import Told, message_of
from . import host
from .compat import NotInComfyUI, unless_changed
from .pack_variables import PackVariables, modules_of_packs
from .rerun_layers import loaded_anew, products_in_fp32, weights_as_stored

KEY = "onediff_guard"  # the key of our wrappers on a MODEL, and of the run in transformer_options
_KINDS = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")
ATTENTION_OVERRIDE = "optimized_attention_override"  # in transformer_options
TAKE_FP32 = {f"attention_{name}" for name in ("basic", "sub_quad", "split", "xformers", "pytorch")}
_INPUTS = {
    "x": "latents",
    "c_concat": "latents to start from",
    "c_crossattn": "a prompt",
    "control": "a ControlNet's residuals",
}


def _outside_of_allocation_graphs() -> AbstractContextManager[object]:
    """Return a context in which ComfyUI (since 0.35) records no allocations: it frees these with the current block."""
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    if pause is None:
        _check_that_none_is_missing()
    return pause() if pause else nullcontext()


@unless_changed("memory of a guard apart from ComfyUI's plans of its own", None, kinds=(NotInComfyUI,))
def _check_that_none_is_missing() -> None:
    host.check_absence("comfy.model_prefetch.pause_malloc_graph", since=(0, 35))


process_state.lasting = _outside_of_allocation_graphs


def wrapped(patcher: Any, wrappers: Mapping[str, Callable[..., Any]]) -> Any:
    """Return a clone of a MODEL (ComfyUI's ModelPatcher) with these wrappers in place of our earlier ones.

    wrappers: kind (one of _KINDS) → wrapper.
    Raises NotInComfyUI if ComfyUI is too old for wrappers, or its WrapperExecutor has changed.
    """
    extension: Any = sys.modules.get("comfy.patcher_extension")
    kinds: Any = getattr(extension, "WrappersMP", None)
    if kinds is None:
        raise NotInComfyUI("This ComfyUI cannot wrap a MODEL's apply_model, which the NaN Guard needs. Update ComfyUI.")
    _check_that_it_goes_on(extension.WrapperExecutor)
    clone = patcher.clone()
    for kind in _KINDS:
        clone.remove_wrappers_with_key(getattr(kinds, kind), KEY)
    for kind, wrapper in wrappers.items():
        clone.add_wrapper_with_key(getattr(kinds, kind), KEY, wrapper)
    return clone


def _check_that_it_goes_on(executor: Any) -> None:
    """Raise NotInComfyUI if our wrappers could not call the rest of the chain."""
    call = signature(executor.__call__)
    try:
        call.bind(executor, torch.Tensor(), transformer_options={})
    except TypeError:
        raise NotInComfyUI(
            "ComfyUI {} has changed '{}'. Update this pack.", host.version(), "WrapperExecutor.__call__"
        ) from None


@dataclass(frozen=True)
class ModelCall:
    """One call. model: ComfyUI's BaseModel. arguments: by name, for `apply_model` and `apply_model_in_fp32`."""

    model: Any
    arguments: dict[str, Any]

    @property
    def network(self) -> torch.nn.Module:
        compiled = self.model.diffusion_model
        return getattr(compiled, "_orig_mod", compiled)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return type(getattr(self.model, "model_config", self.model)).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.model.manual_cast_dtype or self.model.get_dtype()

    @property
    def patched(self) -> frozenset[str]:
        """Names of the network's weights that LoRAs and other weight patches change, in memory or as the layer runs: of
        the model and of prompts."""
        patcher = self.model.current_patcher
        patches = (patcher.patches, *patcher.hook_patches.values()) if patcher else ()
        return frozenset(str(name).removeprefix("diffusion_model.") for each in patches for name in each)

    @property
    def device(self) -> torch.device:
        return self.arguments["x"].device


def around_apply_model(made_by: Callable[[ModelCall], Any]) -> Callable[..., Any]:
    """Return an APPLY_MODEL wrapper of `apply_model`, in which `made_by` computes the denoised latents."""

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
        """executor: calls the rest of the chain, which ends in ComfyUI itself. x: noisy latents, float32. t: sigma."""
        given = {"x": x, "c_concat": c_concat, "c_crossattn": c_crossattn, **conditions}
        call = ModelCall(executor.class_obj, {"executor": executor, **given, "timestep": t, "control": control})
        memory = CallMemory(call.network, transformer_options or {}, call.dtype, (given, t, control))
        call.arguments["memory"] = memory
        with memory.settled():
            try:
                return made_by(call)
            except GuardStopped as stopped:
                if broken := _broken({**given, "control": control}):
                    raise GuardStopped(
                        "The model received {} NaN or infinite values from another node: check the nodes before the "
                        "sampler, and those that change the model.",
                        broken,
                    ) from stopped
                if kept := memory.nan_before():
                    raise GuardStopped(
                        "{} But the model already held NaN before this call, in '{}': choose 'Unload Models and "
                        "Execution Cache' and run again, or remove the node that stores it there.",
                        message_of(stopped),
                        kept,
                    ) from stopped
                raise

    return wrapper


def _broken(given: Mapping[str, Any]) -> str:
    """Return the first input with non-finite values and their number, as "latents with 3"; "" if all are finite."""
    for name, value in given.items():
        if broken := sum(map(non_finite, floating(value))):
            what = _INPUTS.get(name, f"condition '{name}'")
            return f"{what} with {broken}"
    return ""


def apply_model(
    *, executor: Any, memory: CallMemory, control: Any, options: Mapping[str, Any] = MappingProxyType({}), **given: Any
) -> Any:
    """Call the rest of the chain. Networks take ControlNet residuals off their lists as they use them: they get copies
    of the lists, so that the call can be repeated. options: added to ComfyUI's transformer_options."""
    control = pytree.tree_map(lambda residual: residual, control)
    by_position = [given.pop(name) for name in ("x", "timestep", "c_concat", "c_crossattn")]
    return executor(*by_position, control, memory.of_a_call(options), **given)


def calls_others(thorough: bool, *, executor: Any, memory: CallMemory, **_: Any) -> bool:
    """Return whether a call runs code of other nodes or packs inside the network: functions in its options, hooks,
    replaced modules or methods. Many such patches become active only in a later step.

    thorough: check all modules (3 ms for SDXL), not the network's own alone.
    """
    network = executor.class_obj.diffusion_model
    if any(map(_is_patched, network.modules() if thorough else [network])):
        return True
    within = pytree.tree_leaves_with_path(memory.options)
    return any(callable(value) and pytree.MappingKey(KEY) not in path for path, value in within)


_OF_COMFYUI = ("comfy.", "torch.", "einops.")


def _is_patched(module: torch.nn.Module) -> bool:
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or not type(module).__module__.startswith(_OF_COMFYUI):
        return True
    return any(callable(value) and callable(getattr(type(module), name, None)) for name, value in own.items())


def apply_model_in_full(*, executor: Any, **call: Any) -> Any:
    """Call the model from its weights as stored, with layers and attention kernels that take float32."""
    call["memory"].in_full = True
    with products_in_fp32(executor.class_obj.diffusion_model), weights_as_stored():
        attention = _attention_beside(call["memory"].options.get(ATTENTION_OVERRIDE), call["memory"])
        return apply_model(executor=executor, options={ATTENTION_OVERRIDE: attention}, **call)


def apply_model_in_fp32(*, memory: CallMemory, **call: Any) -> Any:
    made = apply_model_in_full(memory=memory, **call)
    memory.keep()
    return made


def load_anew(*, executor: Any, timestep: Any, memory: CallMemory, **given: Any) -> bool:
    """Have ComfyUI reload the model's weights. Returns whether it did; it does not if an input is NaN or infinite."""
    memory.forget()
    if _broken(given) or not loaded_anew(executor.class_obj):
        return False
    memory.renewed()
    return True


def _attention_beside(theirs: Callable[..., Any] | None, memory: CallMemory) -> Callable[..., Any]:
    """Return an attention override for one call in fp32. theirs: another pack's override; None if there is none.

    An override that changes attention calls the attention that it wraps, here ours, or returns a different result: it
    stays. An override with the same result is another kernel: PyTorch's attention replaces it. PyTorch's attention also
    replaces an override that is a kernel by its name, or that fails; `memory.gave_way` gets the name of a failed one.
    """
    # looked up here, outside the network's call: in a ComfyUI without it, the run continues unguarded
    in_fp32 = partial(_attention_in_fp32, sys.modules["comfy.ldm.modules.attention"].attention_pytorch)
    if theirs is None or _is_known_kernel(theirs):
        return in_fp32

    def override(chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked: list[bool] = []

        @wraps(chosen)
        def ours(*args: Any, **kwargs: Any) -> Any:
            asked.append(True)
            return in_fp32(chosen, *args, **kwargs)

        before, made = rollback_point(), None
        try:
            made = theirs(ours, *args, **kwargs)
        except Exception as error:
            if asked or isinstance(error, (torch.OutOfMemoryError, PlanMismatch)) or host.is_interrupt(error):
                raise
            memory.gave_way = getattr(theirs, "__qualname__", type(theirs).__name__)
        if asked:
            return made
        after = rollback_point()
        before()
        plain = in_fp32(chosen, *args, **kwargs)
        if made is None or _is_another_kernel(made, plain):
            return plain
        after()
        return made

    return override


# names of other packs' kernels: attention_override_sage, PatchSageAttention, sageattn; not usage, message
_KERNELS = re.compile(r"(?i:xformers)|(?<![A-Za-z])(?i:sage|flash)|(?<=[a-z])(?:Sage|Flash)")
_SAME = 0.02  # relative error, by norms, up to which two results count as the same


def _is_known_kernel(override: Any) -> bool:
    """Return whether an override is a kernel by its name, or is set by ComfyUI's own node. ComfyUI names a pack's
    module by its path, so only the last part of it is checked."""
    module = str(getattr(override, "__module__", ""))
    named = f"{Path(module).name}.{getattr(override, '__qualname__', '')}"
    return module.startswith("comfy.model_patcher") or bool(_KERNELS.search(named))


def _is_another_kernel(made: Any, plain: torch.Tensor) -> bool:
    """Return whether an attention's result is PyTorch's, within _SAME; also if their difference is NaN."""
    if not isinstance(made, torch.Tensor) or made.shape != plain.shape:
        return False
    return not bool((made.float() - plain.float()).norm() > _SAME * plain.float().norm())


def _attention_in_fp32(pytorch: Callable[..., Any], chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `chosen`; PyTorch's attention instead, if `chosen` takes half precision only (sage, flash, another pack's),
    or if products are in half precision and the device has a fused kernel: `chosen` would use float32."""
    if getattr(chosen, "__name__", "") not in TAKE_FP32 or _is_fused(*args, **kwargs):
        chosen = pytorch
    return chosen(*args, **kwargs)


def _is_fused(*args: Any, heads: int = 0, skip_reshape: bool = False, **_: Any) -> bool:
    """Return whether products are in half precision now, and PyTorch has a fused kernel for this call."""
    query, *rest = args or (None,)
    heads = rest[2] if len(rest) > 2 else heads
    dtype = dtype_of_products()
    if dtype is None or query is None or not heads:
        return False
    from ..precision.kernels import has_fused_attention

    width = query.shape[-1] // (1 if skip_reshape or rest[5:6] == [True] else heads)
    return has_fused_attention(query.device, width, dtype)


_EASYCACHE = "easycache"  # in transformer_options
_POSES, _PREFIXES = "animate2_cache", "prefix_cache"  # in transformer_options; on a network
# in transformer_options: caches of a whole video, in which each call adds or replaces tensors
_REWRITTEN = ("ar_state", _POSES)
# modules whose objects are no state of a call: the memory manager, holders of whole models, ComfyUI's server
OPAQUE = (
    *("comfy.ops.", "comfy.quant_ops.", "comfy.model_patcher.", "comfy.model_management.", "comfy.model_base."),
    *("comfy.multigpu.", "comfy.patcher_extension.", "comfy.hooks.", "comfy.sd.", "comfy.memory_management."),
    *("comfy.model_prefetch.", "comfy.pinned_memory.", "comfy_aimdo."),
    *("comfy.samplers.", "comfy.utils.", "comfy_execution.", "execution.", "server.", "aiohttp.", "tqdm.", "PIL."),
)


class CallMemory:
    """The state around one call of a network, which may be attempted several times, each time from the initial state.

    The rerun that counts keeps its writes, cast to the half precision that an attempt in half precision writes, if they
    fit. Caches of prompts on the network and of poses are not kept. If every attempt failed, everything is restored.

    options: ComfyUI's transformer_options. dtype: the network's dtype. given: the call's other arguments.
    in_full: whether an attempt ran in float32, in whole or in part.
    gave_way: the name of another pack's attention that was replaced in such an attempt, since it fails in float32.
    """

    in_full = False
    gave_way = ""

    def __init__(self, network: torch.nn.Module, options: dict[str, Any], dtype: torch.dtype, given: Any = ()):
        self.options = options
        self._dtype = dtype
        self._easycache = _EasyCache(options.get(_EASYCACHE))
        self._network = network
        beside = {name: value for name, value in options.items() if name not in (_EASYCACHE, *_REWRITTEN)}
        self._states = beside, given
        self._calls = 0
        self._kept: Snapshot | None = None
        self._kept_within: Snapshot | None = None
        self._kept_variables: PackVariables | None = None
        self._captured = _captured(options)
        self._packs = modules_of_packs(network, filter(callable, pytree.tree_leaves(dict(options))))
        self._look()

    def _look(self) -> None:
        self._beside = self._beside_now()
        self._dtypes = self._beside.dtypes  # later also those of tensors that failed calls left
        prefixes = getattr(self._network, _PREFIXES, None)
        rewritten = [prefixes] if hasattr(prefixes, "slots") else []
        self._within = Snapshot(self._network, opaque=OPAQUE, rewritten=rewritten)
        self._dtypes_within = self._within.dtypes
        self._variables = PackVariables(self._packs)
        self._dtypes_of_variables = self._variables.dtypes
        self._pinned = {id(tensor): tensor for pinned in self._pinned_now() for tensor in pinned}

    @unless_changed("knowing what memory a cache has pinned", ())
    def _pinned_now(self) -> Sequence[list[torch.Tensor]]:
        """Return the lists of tensors that ComfyUI has pinned for caches."""
        caches = self.options.get(_POSES), getattr(self._network, _PREFIXES, None)
        slots = [slot for cache in caches for slot in getattr(cache, "slots", ()) if isinstance(slot, dict)]
        return [slot["pinned"] for slot in slots if "pinned" in slot]

    @unless_changed("giving back memory that a cache had pinned for a call that does not count", None)
    def _unpin(self) -> None:
        """Unpin the tensors of the latest call, before they are freed: the device may still be copying from them."""
        for pinned in self._pinned_now():
            new = [each for each in pinned if id(each) not in self._pinned]
            if new and torch.accelerator.is_available():
                torch.accelerator.synchronize()  # a failed call may have left a copy running
            for tensor in new:
                sys.modules["comfy.model_management"].unpin_memory(tensor)
            pinned[:] = [each for each in pinned if id(each) in self._pinned]

    @unless_changed("emptying a cache of poses after a rerun", None)
    def _forget_poses(self) -> None:
        """Empty the cache. Its key is the call's latents: calls in another dtype would fill it once more."""
        if (poses := self.options.get(_POSES)) is not None:
            poses.free()

    def _beside_now(self) -> Snapshot:
        rewritten = [self.options.get(name) for name in _REWRITTEN]
        return Snapshot(*self._states, opaque=OPAQUE, rewritten=rewritten, in_functions=True)  # of patches and wrappers

    def of_a_call(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return transformer_options for one more call, with the initial state. Caches in them are not cast to float32:
        later calls read what a rerun writes there. Raises GuardStopped if the previous call cannot be undone."""
        if self._calls:
            if self._kept is None:  # else it was a rerun
                self._dtypes |= self._beside.dtypes_now()
                self._dtypes_within |= self._within.dtypes_now()
                self._dtypes_of_variables |= self._variables.dtypes_now()
            if lost := self._rewind():
                raise GuardStopped(
                    "A failed call has overwritten '{}', which was too large to copy first, so the call cannot be "
                    "repeated. Choose a smaller size or fewer frames, or remove the node that keeps it between calls.",
                    lost,
                )
        self._calls += 1
        return {**self.options, **self._easycache.of_a_call(), **more}

    def keep(self) -> None:
        """Make the latest call, a rerun, the one that counts. Unpins its tensors: `settled` may replace them."""
        self._easycache.keep()
        self._forget_poses()
        self._unpin()
        self._kept = self._beside_now()
        if not any(hasattr(self._network, name) for name in ("clear_kv_cache", _PREFIXES)):
            self._kept_within = Snapshot(self._network, opaque=OPAQUE)
        self._kept_variables = PackVariables(self._packs)

    def forget(self) -> None:
        """Discard all calls so far, and restore the initial state."""
        self._easycache.forget()
        self._kept = self._kept_within = self._kept_variables = None
        self._rewind()
        self._calls = 0

    def nan_before(self) -> str:
        """Return the name of a tensor of the network or its caches that was NaN before the first call; "" if none."""
        return self._within.first_nan() or self._beside.first_nan()

    def renewed(self) -> None:
        """Take the initial state again: the network was reloaded, with its buffers."""
        self._look()

    @contextmanager
    def settled(self) -> Generator[None]:
        """Wrap all attempts. Ends with the state of the call that counts; after an error, with the initial state."""
        try:
            yield
        except BaseException as error:
            # after another error, packs' variables may describe it
            if lost := self._rewind(variables=isinstance(error, Told)):
                error.lost = lost  # pyright: ignore[reportAttributeAccessIssue] - for Run.or_plain
            raise
        self._easycache.settle()
        if self._kept is not None:
            otherwise = self._dtype if self._calls > 1 else None  # None: no call ran in half precision
            self._within.restore()
            if self._kept_within is not None:
                self._kept_within.restore()
                self._kept_within.cast_to_half(self._dtypes_within, otherwise, self._within.tensor_ids())
            self._kept.restore()
            self._kept.cast_to_half(self._dtypes, self._dtype, self._beside.tensor_ids())
            if self._kept_variables is not None:
                self._kept_variables.restore()
                self._kept_variables.narrow(self._dtypes_of_variables, otherwise, self._variables.tensors)
        if self.in_full and self._dtype in HALF_DTYPES:
            for at, (cell, value) in _captured(self.options).items():
                made = isinstance(value, torch.Tensor) and value.dtype is torch.float32
                if made and value is not self._captured.get(at, (cell, None))[1]:
                    narrowed = value.to(self._dtype)
                    cell.cell_contents = narrowed if narrowed.isfinite().all() else value

    def _rewind(self, *, variables: bool = True) -> str:
        self._unpin()
        if variables:
            self._variables.restore()
        return self._beside.restore() or self._within.restore()


def _captured(options: Mapping[str, Any]) -> dict[int, tuple[CellType, Any]]:
    """Return the closure cells of functions that nodes put into a model, and their contents, by the cell's id. SDPose's
    node keeps there the input of the network's head, which it calls itself."""
    found: dict[int, tuple[CellType, Any]] = {}
    for function in pytree.tree_leaves([options.get(name) for name in ("patches", "patches_replace")]):
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                found[id(cell)] = cell, cell.cell_contents
    return found


class _EasyCache:
    """The state of ComfyUI's EasyCache or LazyCache: what they recorded in earlier steps, to skip the model.

    They run inside the guard, and several GPUs share one state. So each attempt of a step begins with a copy of the
    same state, and only the call that counts writes its changes back. Otherwise a rerun, with the attempt's inputs,
    would be skipped because of the attempt. Changes that another thread writes at the same time stay.
    """

    def __init__(self, holder: Any):
        self._holder = holder
        self._before = self._copied(holder)
        self._made: Any = None
        self._kept: Any = None

    def of_a_call(self) -> dict[str, Any]:
        if self._holder is None:
            return {}
        self._made = self._copied(self._before)
        return {_EASYCACHE: self._made}

    def keep(self) -> None:
        self._kept = self._made

    def forget(self) -> None:
        self._kept = None

    def settle(self) -> None:
        if self._made is None:
            return
        before, after = vars(self._before), vars(self._kept or self._made)
        with _SETTLING:
            now = vars(self._holder)
            now.update({name: _settled(before.get(name), value, now.get(name)) for name, value in after.items()})

    @staticmethod
    def _copied(holder: Any) -> Any:
        copied = copy.copy(holder)
        if holder is not None:
            with _SETTLING:
                state = vars(holder).items()
                vars(copied).update((name, copy.copy(v) if isinstance(v, (dict, list)) else v) for name, v in state)
        return copied


_SETTLING = threading.Lock()


def _settled(before: Any, after: Any, now: Any) -> Any:
    """Return the value `now` with the changes that one call made, from `before` to `after`."""
    if isinstance(after, dict) and isinstance(before, dict) and isinstance(now, dict):
        changed = {key: value for key, value in after.items() if before.get(key) is not value}
        return {key: value for key, value in now.items() if key in after or key not in before} | changed
    if isinstance(after, list) and isinstance(before, list):
        return now if [*map(id, after)] == [*map(id, before)] else after
    return now if after is before else after
