"""The guard for ComfyUI's own MODEL and VAE: on a copy that shares the weights, with nothing patched elsewhere.

A MODEL is guarded by ComfyUI's wrappers: around `apply_model`, around loading for a sampling run, and around the whole
run, for its report. ControlNets of the prompts are guarded with it: they overflow too, and Flux's ControlNets clip, as
Flux does. ControlNets have no wrappers: during a run each gets its own `get_control`, and inside that its network gets
its own `forward`.
A VAE has no wrappers either: it and its network get derived classes. Each call of a VAE method is a run, and the
network's `decode` and `encode` are guarded tile by tile.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType, NoneType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision.dtypes import DTYPES, FP16_MAX, dtype_name
from ..precision.layer_peaks import floating
from ..precision.policy import Component
from ..precision.snapshot import Snapshot
from ..precision.upcast import OneOperation
from ..trust.message import BadInput, Message, shown
from . import host
from .compat import NotInComfyUI, unless_changed, what_changed
from .model_calls import (
    KEY,
    ModelCall,
    apply_model,
    apply_model_in_fp32,
    apply_model_in_full,
    around_apply_model,
    calls_others,
    load_anew,
    wrapped,
)
from .native_network import ComfyNetwork
from .rerun_layers import products_in_fp32, weights_as_stored
from .runs import Run, Settings, guarded_run

_WHOLE = ("decode", "decode_tiled", "encode", "encode_tiled")  # methods of a VAE
_PARTS = {"decode": Component.VAE_DECODE, "encode": Component.VAE_ENCODE}  # methods of its network: a tile, or all


def guarded_model(patcher: Any, settings: Settings) -> Any:
    """Return a guarded clone of a MODEL (ComfyUI's ModelPatcher). Replaces an earlier guard.

    Raises NotInComfyUI if ComfyUI is too old for wrappers.
    """
    guard = _ModelGuard(settings)
    wrappers = {"OUTER_SAMPLE": guard.sample, "PREPARE_SAMPLING": guard.prepare, "APPLY_MODEL": guard.apply}
    return wrapped(patcher, wrappers)


def guarded_vae(vae: Any, settings: Settings) -> Any:
    """Return a guarded copy of a VAE. Replaces an earlier guard.

    Raises BadInput if the checkpoint has no VAE or another pack has replaced one of the VAE's methods, and NotInComfyUI
    if its network lacks `decode` or `encode` (in 0.33: Trellis 2's, TripoSplat's and MiniMax Music 3's).
    """
    if vae.first_stage_model is None:
        raise BadInput("This checkpoint has no VAE. Use a VAE loader instead.")
    for name in _WHOLE:
        if name in vars(vae):
            raise BadInput("Another node has replaced this VAE's '{}'. Put the NaN Guard before that node.", name)
    if not all(hasattr(vae.first_stage_model, name) for name in _PARTS):
        kind = type(vae.first_stage_model).__name__
        raise NotInComfyUI("The NaN Guard does not support {}: it has no standard encode and decode methods.", kind)
    guard = _VaeGuard(settings, vae)
    copied = _derived(copy.copy(vae), _WHOLE, guard.whole)
    copied.first_stage_model = _derived(vae.first_stage_model, _PARTS, guard.part)
    return copied


def or_unguarded(guarded: Callable[[Any, Settings], Any], of: Any, settings: Settings) -> Any:
    """Return a guarded MODEL or VAE; unguarded, and saying so, if ComfyUI has changed. An inserted guard raises."""
    try:
        return guarded(of, settings)
    except Exception as error:
        if settings.inserted or not (why := what_changed(error)):
            raise
        Run(settings, 0).end(Message("Not guarded: {}", why))
        return of


def is_guarded(of: Any) -> bool:
    """Return whether a MODEL or VAE has a guard already."""
    wrappers = of.wrappers if hasattr(of, "add_wrapper_with_key") else {}
    return isinstance(of, _Guarded) or any(KEY in named for named in wrappers.values())


# --- MODEL ------------------------------------------------------------------------------------------------------------


class _ModelGuard:
    """The wrappers of a MODEL. `executor` calls the rest of the chain, which ends in ComfyUI itself."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._calls = 0

    def sample(self, executor: Any, *args: Any, **by_name: Any) -> Any:
        """Wrap a sampling run. Its model calls find the run in their transformer_options, which are this sampling's
        own: calls may come from other threads, and from a thread that goes on after an error has ended the run."""
        found = _sampling(executor, *args, **by_name)
        if found is None:
            return executor(*args, **by_name)
        options, steps = found
        with guarded_run(self._settings, steps) as run:
            options[KEY], before = run, self._calls
            try:
                made = executor(*args, **by_name)
            finally:
                run.forget()
            if steps > 0 and self._calls == before:
                run.saw_no_call()
            return made

    def prepare(self, executor: Any, *args: Any, **by_name: Any) -> Any:
        """Wrap the loading of the model. Returns the loaded model, its text refiner guarded, and the other results."""
        made = executor(*args, **by_name)
        options = by_name.get("model_options") or (args[3] if len(args) > 3 else None)
        run: Run | None = (options.get("transformer_options") or {}).get(KEY) if isinstance(options, dict) else None
        if run is None or type(made) is not tuple:
            return made
        run.until_end.enter_context(_guarded_controlnets(run, made[1]))
        return run.refining(made[0]), *made[1:]

    def apply(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrap `apply_model` by a guarded call, with the fallback of `Run.or_plain`."""
        self._calls += 1
        options: Any = kwargs.get("transformer_options") or (args[4] if len(args) > 4 else None) or {}
        run: Run | None = options.get(KEY)
        if run is not None:
            run.meet(getattr(executor, "class_obj", None))  # other versions of ComfyUI may lack it
            return _apply(run, executor, x, *args, **kwargs)
        if self._settings.inserted:
            return executor(x, *args, **kwargs)
        with guarded_run(self._settings) as run:
            return _apply(run, executor, x, *args, **kwargs)


def _wants_gradient(*inputs: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in floating(inputs))


def _apply(run: Run, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _wants_gradient(x, args, kwargs):
        return run.unguarded(lambda: executor(x, *args, **kwargs))

    def made_by(call: ModelCall) -> Any:
        made = run.call(denoiser_of(call), **call.arguments)
        if name := call.arguments["memory"].gave_way:
            run.note(Message("attention '{}' of another pack fails in float32: replaced by PyTorch's", shown(name)))
        return made

    guarded = around_apply_model(made_by)
    return run.or_plain(
        lambda: guarded(executor, x, *args, **kwargs),
        lambda: executor(x, *args, **kwargs),
        lambda: torch.full_like(x, torch.nan),
    )


@unless_changed("one report for a whole run: each call has its own", None)
def _sampling(executor: Any, *args: Any, **by_name: Any) -> tuple[dict[str, Any], int]:
    """Return a sampling's transformer_options and number of steps. args: noise, latents, sampler, sigmas and others."""
    sigmas = by_name["sigmas"] if "sigmas" in by_name else args[3]
    return executor.class_obj.model_options["transformer_options"], len(sigmas) - 1


def denoiser_of(call: ModelCall) -> ComfyNetwork:
    return ComfyNetwork(
        model=call.name,
        component=Component.DENOISER,
        network=call.network,
        dtype=call.dtype,
        device=call.device,
        attempt=apply_model,
        in_full=apply_model_in_full,
        rerun=apply_model_in_fp32,
        renew=load_anew,
        patched=call.patched,
        snapshot=lambda *_: Snapshot(),  # CallMemory restores all state
        calls_others=calls_others,
    )


# --- ControlNets ------------------------------------------------------------------------------------------------------


@contextmanager
def _guarded_controlnets(run: Run, conds: Mapping[str, Any]) -> Generator[None]:
    """Guard a sampling's ControlNets. conds: its conditions by name, as ComfyUI's PREPARE_SAMPLING returns them."""
    guards: dict[torch.nn.Module, _NetworkGuard] = {}  # several may share a network

    def guarded(control: Any) -> AbstractContextManager[None]:
        network, dtype = _network_of(control)
        if network is None:
            return nullcontext()
        guards[network] = guards.get(network) or _NetworkGuard(network, run.of_controlnet())
        return guards[network].guarded(dtype)

    with ExitStack() as put_back:
        for control, plain in _controlnets(conds):
            if id(control) not in _RUNNING:  # else a run around this one guards it
                put_back.enter_context(_in_place(control, get_control=partial(_get_control, control, plain)))
                put_back.callback(_RUNNING.pop, id(control))
                _RUNNING[id(control)] = guarded
        yield


# id of a ControlNet → a function that guards its network in the current run
_RUNNING: dict[int, Callable[[Any], AbstractContextManager[None]]] = {}


def _get_control(control: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a ControlNet, guarded during a run. Another pack may keep this method, and call it after the run."""
    with (_RUNNING.get(id(control)) or nullcontext)(control):
        return plain(*args, **kwargs)


@unless_changed("guarding ControlNets", ())
def _controlnets(conds: Mapping[str, Any]) -> Sequence[tuple[Any, Callable[..., Any]]]:
    """Return the conditions' ControlNets, chained ones and clones on other devices too, each with its `get_control`."""
    found: dict[int, Any] = {}
    more = [cond["control"] for several in conds.values() for cond in several if "control" in cond]
    while more:
        control = more.pop()
        if control is not None and id(control) not in found:
            found[id(control)] = control
            more += [control.previous_controlnet, *_on_other_devices(control)]
    return [(control, control.get_control) for control in found.values()]


@unless_changed("guarding ControlNets on other devices", ())
def _on_other_devices(control: Any) -> Sequence[Any]:
    if not hasattr(control, "multigpu_clones"):
        host.check_absence("comfy.controlnet.ControlNet.multigpu_clones", since=(0, 33))
        return ()
    return [*control.multigpu_clones.values()]


@unless_changed("guarding ControlNets", (None, None))
def _network_of(control: Any) -> tuple[Any, Any]:
    """Return a ControlNet's network and dtype. (None, None) for other packs' classes, whose network ComfyUI does not
    call, and for a T2I-Adapter, which computes in float32."""
    ours = isinstance(control, sys.modules["comfy.controlnet"].ControlNet)
    if not ours or not isinstance(control.control_model, torch.nn.Module):
        return None, None
    return control.control_model, control.manual_cast_dtype or control.control_model.dtype


@contextmanager
def _in_place(owner: Any, **methods: Callable[..., Any]) -> Generator[None]:
    own = getattr(owner, "__dict__", {})  # an object with slots stays as it is
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        ours = [name for name, method in methods.items() if own.get(name) is method]  # the others are another pack's
        for name in ours:
            del own[name]
        own.update({name: before[name] for name in ours if name in before})


class _NetworkGuard:
    def __init__(self, network: torch.nn.Module, run: Run):
        self._network, self._run = network, run
        self._plain: Callable[..., Any] | None = None  # its own forward, while it is guarded

    @contextmanager
    def guarded(self, dtype: torch.dtype) -> Generator[None]:
        """Guard the network's `forward` inside. dtype: the dtype that the network computes in."""
        if self._plain:
            yield
            return
        self._plain = self._network.forward
        try:
            with _in_place(self._network, forward=partial(self._forward, dtype)):
                yield
        finally:
            self._plain = None

    def _forward(self, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        if _wants_gradient(args, kwargs):
            return self._computed(*args, **kwargs)

        def guarded() -> Any:
            given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            how = {"dtype": dtype, "device": given.device, "attempt": self._attempt, "in_full": self._in_full}
            kind = type(self._network).__name__
            of = ComfyNetwork(kind, Component.DENOISER, self._network, rerun=self._in_full, **how)
            made = self._run.call(of, *args, **kwargs)
            largest = self._run.latest.largest
            # half precision holds what a ControlNet gave, times its strength, and with what others give
            if dtype_name(dtype) in DTYPES and largest is not None and largest < FP16_MAX / 16:
                made = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in made]
            return pytree.tree_unflatten([made[at] for at in self._at], self._structure)

        return self._run.or_plain(guarded, partial(self._computed, *args, **kwargs))

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        assert self._plain
        return self._plain(*args, **kwargs)

    def _attempt(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the network. Returns its output's leaves, each once: Flux's output repeats a few tensors many times."""
        leaves, self._structure = pytree.tree_flatten(self._computed(*args, **kwargs))
        once = {id(leaf): leaf for leaf in leaves}
        self._at = [[*once].index(id(leaf)) for leaf in leaves]
        return [*once.values()]

    def _in_full(self, *args: Any, **kwargs: Any) -> list[Any]:
        with products_in_fp32(self._network), weights_as_stored():
            return self._attempt(*args, **kwargs)


# --- VAE --------------------------------------------------------------------------------------------------------------


class _Guarded:
    """Base class of a guarded VAE or network. The guarded methods are in its class, not on the instance, so that they
    use what other nodes set on the instance, on a copy of it, or on the copy's network."""

    onediff_guard_replaced: dict[str, Callable[..., Any]]  # other packs' replacements of methods, guarded too


def _derived(of: Any, names: Iterable[str], guarded: Callable[..., Any]) -> Any:
    """Return a shallow copy of `of` with methods that call `guarded(it, name, method, …)`. Replaces an earlier
    guard."""
    kind, state = type(of), vars(of)
    replaced = {name: state[name] for name in names if name in state}
    if _Guarded in kind.__bases__:
        replaced, kind = kind.onediff_guard_replaced | replaced, kind.__bases__[1]

    def named(name: str) -> Callable[..., Any]:
        @wraps(getattr(of, name))
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            method = replaced.get(name) or getattr(super(derived, self), name, None)
            method = method or kind.__getattr__(self, name)  # for a network that forwards attributes
            return guarded(self, name, method, *args, **kwargs)

        return call

    members = {name: named(name) for name in names}
    says = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "onediff_guard_replaced": replaced}
    bases = (kind,) if issubclass(kind, _Guarded) else (_Guarded, kind)  # another pack may derive from ours
    derived: Any = type(kind.__name__, bases, members | says)
    made = object.__new__(derived)
    made.__dict__.update({name: value for name, value in state.items() if name not in replaced})
    return made


@unless_changed("keeping a VAE in fp32 that ComfyUI runs only in fp32", False)
def _in_fp32_alone(vae: Any) -> bool:
    return vae.working_dtypes == [torch.float32]


_INSIDE = threading.local()  # call: whether a guarded network computes in this thread: guarded methods inside run plain


class _VaeGuard(threading.local):
    """The guard of a VAE. Per thread it holds the current run: a call of a VAE method, which may call another one.

    vae: the VAE that the guard was made for, for calls of its network alone.
    """

    _run: Run | None = None

    def __init__(self, settings: Settings, vae: Any):
        self._settings, self._vae = settings, vae

    def whole(self, vae: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a VAE. Guards the VAE's network first if another node has replaced it after the guard."""
        if not isinstance(vae.first_stage_model, (_Guarded, NoneType)):
            self._guard_network(vae)
        if self._run:
            return method(*args, **kwargs)
        before, self._vae = self._vae, vae
        try:
            with self._running() as run:
                run.retried = not name.endswith("tiled")  # ComfyUI repeats it tiled when out of memory
                return method(*args, **kwargs)
        finally:
            self._vae = before

    @unless_changed("guarding the network that another node has given a VAE", None)
    def _guard_network(self, vae: Any) -> None:
        vae.first_stage_model = _derived(vae.first_stage_model, _PARTS, self.part)

    def part(self, network: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a VAE's network, guarded."""
        if getattr(_INSIDE, "call", False):
            return method(*args, **kwargs)

        def full(_network: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with products_in_fp32(network), weights_as_stored():
                return method(*args, **kwargs)

        def guarded() -> Any:
            in_full, kind, vae = MethodType(full, network), type(network).__name__, self._vae
            where = network, vae.vae_dtype, vae.device
            of = ComfyNetwork(kind, _PARTS[name], *where, method, in_full, in_full, fp32_alone=_in_fp32_alone(vae))
            return run.call(of, *args, **kwargs)

        _INSIDE.call = True
        try:
            with nullcontext(self._run) if self._run else self._running() as run:
                if _wants_gradient(args, kwargs):
                    return run.unguarded(lambda: method(*args, **kwargs))
                # a node may call it inside a guarded model, whose modes need not see what this guard recomputes
                return OneOperation(run.or_plain)(guarded, lambda: method(*args, **kwargs))
        finally:
            _INSIDE.call = False

    @contextmanager
    def _running(self) -> Generator[Run]:
        with guarded_run(self._settings) as self._run:
            try:
                yield self._run
            finally:
                self._run = None
