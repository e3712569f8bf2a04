"""ComfyUI's own MODEL and VAE under the guard: on a copy that shares the weights, with nothing patched elsewhere.

A MODEL is guarded through ComfyUI's wrappers: around `apply_model`, around what loads the model for a sampling run, and
around the whole run, for its report.
ControlNets of the prompts are guarded with it: they overflow as well, and Flux's clip that, as Flux does. They have no
wrappers, so while the run goes on, one has a `get_control` of its own, amid which its network has its own `forward`.
A VAE has no wrappers, so it and its network get classes derived from their own: the VAE's methods are a run each, and
the network's `decode` and `encode` are guarded tile by tile.
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
from ..precision.observe import floating
from ..precision.policy import Component
from ..precision.snapshot import Snapshot
from ..trust.message import BadInput, Message, shown
from . import host
from .calls import (
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
from .compat import NotInComfyUI, unless_changed, what_changed
from .layers import products_in_fp32, weights_as_stored
from .networks import ComfyNetwork
from .runs import Run, Settings, guarded_run

_WHOLE = ("decode", "decode_tiled", "encode", "encode_tiled")  # of a VAE
_PARTS = {"decode": Component.VAE_DECODE, "encode": Component.VAE_ENCODE}  # of its network: a tile, or all


def guarded_model(patcher: Any, settings: Settings) -> Any:
    """A clone of a MODEL (ComfyUI's ModelPatcher) that is guarded. A guard that it had before is replaced.

    Raises NotInComfyUI where ComfyUI is too old to have the wrappers.
    """
    guard = _ModelGuard(settings)
    wrappers = {"OUTER_SAMPLE": guard.sample, "PREPARE_SAMPLING": guard.prepare, "APPLY_MODEL": guard.apply}
    return wrapped(patcher, wrappers)


def guarded_vae(vae: Any, settings: Settings) -> Any:
    """A copy of a VAE that is guarded. A guard that it had before is replaced.

    Raises BadInput where there is no VAE in it, or another pack has replaced one of its methods, and NotInComfyUI where
    its network has other methods (in 0.33, those for 3D models and MiniMax Music 3).
    """
    if vae.first_stage_model is None:
        raise BadInput("There is no VAE in this checkpoint. Use a VAE loader in its place.")
    for name in _WHOLE:
        if name in vars(vae):
            raise BadInput("Another node has replaced this VAE's '{}'. Put the NaN Guard before that node.", name)
    if not all(hasattr(vae.first_stage_model, name) for name in _PARTS):
        kind = type(vae.first_stage_model).__name__
        raise NotInComfyUI("{} decodes by methods of its own, which the NaN Guard does not know.", kind)
    guard = _VaeGuard(settings, vae)
    copied = _derived(copy.copy(vae), _WHOLE, guard.whole)
    copied.first_stage_model = _derived(vae.first_stage_model, _PARTS, guard.part)
    return copied


def or_unguarded(guarded: Callable[[Any, Settings], Any], of: Any, settings: Settings) -> Any:
    """A MODEL or VAE, guarded; where this ComfyUI is not as we know it, as it is, which the node says."""
    try:
        return guarded(of, settings)
    except Exception as error:
        if settings.inserted or not (why := what_changed(error)):
            raise
        Run(settings, 0).end(Message("Not guarded: {}", why))
        return of


def is_guarded(of: Any) -> bool:
    """Whether a MODEL or VAE has a guard already."""
    wrappers = of.wrappers if hasattr(of, "add_wrapper_with_key") else {}
    return isinstance(of, _Guarded) or any(KEY in named for named in wrappers.values())


# --- MODEL ------------------------------------------------------------------------------------------------------------


class _ModelGuard:
    """What the wrappers of a MODEL do. `executor` goes on with the chain, and ends in ComfyUI itself."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._calls = 0

    def sample(self, executor: Any, *args: Any, **by_name: Any) -> Any:
        """Its calls find the run in their options, which are this sampling's own: they may come from other threads,
        and from one that computes on after an error has ended the run."""
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
        """Hands on the loaded model, then what it needs."""
        made = executor(*args, **by_name)
        options = by_name.get("model_options") or (args[3] if len(args) > 3 else None)
        run: Run | None = (options.get("transformer_options") or {}).get(KEY) if isinstance(options, dict) else None
        if run is None or type(made) is not tuple:
            return made
        run.until_end.enter_context(_guarded_controlnets(run, made[1]))
        return run.refining(made[0]), *made[1:]

    def apply(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A call, guarded; where that fails, as `Run.or_plain` has it."""
        self._calls += 1
        options: Any = kwargs.get("transformer_options") or (args[4] if len(args) > 4 else None) or {}
        run: Run | None = options.get(KEY)
        if run is not None:
            run.meet(getattr(executor, "class_obj", None))  # another ComfyUI may have none
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
            run.note(Message("'{}', another pack's attention, fails in float32: PyTorch's took its place", shown(name)))
        return made

    guarded = around_apply_model(made_by)
    return run.or_plain(
        lambda: guarded(executor, x, *args, **kwargs),
        lambda: executor(x, *args, **kwargs),
        lambda: torch.full_like(x, torch.nan),
    )


@unless_changed("one report for a whole run: each call has its own", None)
def _sampling(executor: Any, *args: Any, **by_name: Any) -> tuple[dict[str, Any], int]:
    """transformer_options of a sampling, and its steps: of its noise, latents, sampler and sigmas."""
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
        snapshot=lambda *_: Snapshot(),  # CallMemory has it all
        calls_others=calls_others,
    )


# --- ControlNets ------------------------------------------------------------------------------------------------------


@contextmanager
def _guarded_controlnets(run: Run, conds: Mapping[str, Any]) -> Generator[None]:
    """conds: what a sampling is given, by name, as ComfyUI's PREPARE_SAMPLING returns it."""
    guards: dict[torch.nn.Module, _NetworkGuard] = {}  # several may share a network

    def guarded(control: Any) -> AbstractContextManager[None]:
        network, dtype = _network_of(control)
        if network is None:
            return nullcontext()
        guards[network] = guards.get(network) or _NetworkGuard(network, run.of_controlnet())
        return guards[network].guarded(dtype)

    with ExitStack() as put_back:
        for control, plain in _controlnets(conds):
            if id(control) not in _RUNNING:  # by a run that this one is made in
                put_back.enter_context(_in_place(control, get_control=partial(_get_control, control, plain)))
                put_back.callback(_RUNNING.pop, id(control))
                _RUNNING[id(control)] = guarded
        yield


# the id of a ControlNet → what guards its network in the run that goes on
_RUNNING: dict[int, Callable[[Any], AbstractContextManager[None]]] = {}


def _get_control(control: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Another pack may keep this method in one of its own, and call it in later runs, or in none."""
    with (_RUNNING.get(id(control)) or nullcontext)(control):
        return plain(*args, **kwargs)


@unless_changed("guarding ControlNets", ())
def _controlnets(conds: Mapping[str, Any]) -> Sequence[tuple[Any, Callable[..., Any]]]:
    """All of them, with those that each is chained to, each with its `get_control`."""
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
    """A ControlNet's network, and the dtype that it computes in. Others have none that ComfyUI calls: other packs' own,
    and a T2I-Adapter, which computes in float32."""
    ours = isinstance(control, sys.modules["comfy.controlnet"].ControlNet)
    if not ours or not isinstance(control.control_model, torch.nn.Module):
        return None, None
    return control.control_model, control.manual_cast_dtype or control.control_model.dtype


@contextmanager
def _in_place(owner: Any, **methods: Callable[..., Any]) -> Generator[None]:
    own = getattr(owner, "__dict__", {})  # one with slots keeps its methods
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        ours = [name for name, method in methods.items() if own.get(name) is method]  # else another pack's is there
        for name in ours:
            del own[name]
        own.update({name: before[name] for name in ours if name in before})


class _NetworkGuard:
    def __init__(self, network: torch.nn.Module, run: Run):
        self._network, self._run = network, run
        self._plain: Callable[..., Any] | None = None  # what computes it, where it is guarded now

    @contextmanager
    def guarded(self, dtype: torch.dtype) -> Generator[None]:
        """dtype: the network computes in."""
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
        """Call the network. Returns what is in its output, each once: Flux's is a few tensors many times."""
        leaves, self._structure = pytree.tree_flatten(self._computed(*args, **kwargs))
        once = {id(leaf): leaf for leaf in leaves}
        self._at = [[*once].index(id(leaf)) for leaf in leaves]
        return [*once.values()]

    def _in_full(self, *args: Any, **kwargs: Any) -> list[Any]:
        with products_in_fp32(self._network), weights_as_stored():
            return self._attempt(*args, **kwargs)


# --- VAE --------------------------------------------------------------------------------------------------------------


class _Guarded:
    """A base of a VAE or a network whose methods are guarded. The methods are its class's, not its own, so that they
    compute by what other nodes set on it, on a copy of it, or on a copy's network."""

    onediff_guard_replaced: dict[str, Callable[..., Any]]  # methods that another pack has replaced, which are guarded


def _derived(of: Any, names: Iterable[str], guarded: Callable[..., Any]) -> Any:
    """Return a shallow copy of `of` with methods that call `guarded(it, name, method, …)`. A guard that it had before
    is replaced."""
    kind, state = type(of), vars(of)
    replaced = {name: state[name] for name in names if name in state}
    if _Guarded in kind.__bases__:
        replaced, kind = kind.onediff_guard_replaced | replaced, kind.__bases__[1]

    def named(name: str) -> Callable[..., Any]:
        @wraps(getattr(of, name))
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            method = replaced.get(name) or getattr(super(derived, self), name, None)
            method = method or kind.__getattr__(self, name)  # of a network that hands on what it is asked for
            return guarded(self, name, method, *args, **kwargs)

        return call

    members = {name: named(name) for name in names}
    says = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "onediff_guard_replaced": replaced}
    bases = (kind,) if issubclass(kind, _Guarded) else (_Guarded, kind)  # another pack may derive from ours
    derived: Any = type(kind.__name__, bases, members | says)
    made = object.__new__(derived)
    made.__dict__.update({name: value for name, value in state.items() if name not in replaced})
    return made


@unless_changed("keeping a VAE in fp32 that ComfyUI computes in nothing less", False)
def _in_fp32_alone(vae: Any) -> bool:
    return vae.working_dtypes == [torch.float32]


_INSIDE = threading.local()  # call: whether a guarded network computes in this thread, which may call what is guarded


class _VaeGuard(threading.local):
    """The run of a VAE that is going on in this thread: a call of a method, which may call another one.

    vae: the VAE that the guard was made for, whose network may be called without it.
    """

    _run: Run | None = None

    def __init__(self, settings: Settings, vae: Any):
        self._settings, self._vae = settings, vae

    def whole(self, vae: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a VAE, whose network another node may have put in after the guard."""
        if not isinstance(vae.first_stage_model, (_Guarded, NoneType)):
            self._guard_network(vae)
        if self._run:
            return method(*args, **kwargs)
        before, self._vae = self._vae, vae
        try:
            with self._running() as run:
                run.retried = not name.endswith("tiled")  # ComfyUI goes on tiled where memory runs out
                return method(*args, **kwargs)
        finally:
            self._vae = before

    @unless_changed("guarding the network that another node has given a VAE", None)
    def _guard_network(self, vae: Any) -> None:
        vae.first_stage_model = _derived(vae.first_stage_model, _PARTS, self.part)

    def part(self, network: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a VAE's network."""
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
                return run.or_plain(guarded, lambda: method(*args, **kwargs))
        finally:
            _INSIDE.call = False

    @contextmanager
    def _running(self) -> Generator[Run]:
        with guarded_run(self._settings) as self._run:
            try:
                yield self._run
            finally:
                self._run = None
