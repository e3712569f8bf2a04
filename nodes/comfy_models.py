"""ComfyUI's own MODEL and VAE under the guard: on a copy that shares the weights, with nothing patched elsewhere.

A MODEL is guarded through the wrappers that ComfyUI keeps for each MODEL: around `apply_model`, where inputs are not
cast to half precision yet, and around a whole sampling run, for its report. What other packs wrap stays in the chain.
A VAE has no wrappers, so its copy gets a shell of the network whose `decode` and `encode` are guarded tile by tile.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..pipelines.errors import BadInput
from ..precision.arch import detect
from ..precision.dtypes import DTYPES, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, StageGuard
from ..precision.observe import floating, largest, non_finite
from ..precision.policy import Component, Plan
from ..precision.report import RunReport
from ..precision.upcast import RerunUnsupported
from . import host

logger = logging.getLogger(__name__)

KEY = "onediff_guard"  # of our wrappers on a MODEL
ATTENTION_OVERRIDE = "optimized_attention_override"  # in transformer_options
TAKE_FP32 = {f"attention_{name}" for name in ("basic", "sub_quad", "split", "xformers", "pytorch")}
_UNGUARDED = "onediff_guard_unguarded"


def guarded_model(patcher: Any, policy: GuardPolicy, node_id: str | None) -> Any:
    """A clone of a MODEL (ComfyUI's ModelPatcher) that is guarded. A guard that it had before is replaced.

    Raises BadInput where ComfyUI is too old to have the wrappers.
    """
    kinds: Any = getattr(sys.modules.get("comfy.patcher_extension"), "WrappersMP", None)
    if not hasattr(kinds, "APPLY_MODEL"):
        raise BadInput("This ComfyUI cannot wrap a MODEL's apply_model, which the guard needs. Update ComfyUI.")
    guard, clone = _ModelGuard(policy, node_id), patcher.clone()
    for kind, wrapper in ((kinds.OUTER_SAMPLE, guard.sample), (kinds.APPLY_MODEL, guard.apply_model)):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def guarded_vae(vae: Any, policy: GuardPolicy, node_id: str | None) -> Any:
    """A copy of a VAE that is guarded. A guard that it had before is replaced.

    Raises BadInput where there is no VAE in it, or another pack has replaced one of its methods.
    """
    vae = getattr(vae, _UNGUARDED, vae)
    network = getattr(vae, "first_stage_model", None)
    if network is None:
        raise BadInput("There is no VAE in this checkpoint. Use a VAE loader in its place.")
    guard, copied, shell = _Guarding(policy, node_id), copy.copy(vae), copy.copy(network)
    for name, component in (("decode", Component.VAE_DECODE), ("encode", Component.VAE_ENCODE)):
        shell.__dict__[name] = _guarded_network(guard, vae, component, getattr(network, name))
    copied.first_stage_model = shell
    for name in ("decode", "decode_tiled", "encode", "encode_tiled"):
        if name in vars(vae):
            raise BadInput(f"Another node has replaced this VAE's '{name}'. Put the NaN Guard before that node.")
        setattr(copied, name, _as_one_run(guard, getattr(copied, name)))
    setattr(copied, _UNGUARDED, vae)
    return copied


@dataclass(frozen=True)
class _Stage:
    """What one guard guards."""

    model: str  # its name, for people
    component: Component
    network: torch.nn.Module
    dtype: torch.dtype  # it computes in
    device: torch.device
    attempt: Callable[..., Any]
    rerun: Callable[..., Any]
    peak_inside: Callable[[], torch.Tensor | None] | None = None


class _Guarding:
    """The runs of one guarded MODEL or VAE, each with a report of its own, which is shown on the guard's node."""

    def __init__(self, policy: GuardPolicy, node_id: str | None):
        self._policy = policy
        self._node_id = node_id
        self._runs: list[_Run] = []  # those that are going on: a sampler may start another

    @contextmanager
    def run(self, steps: int = 0) -> Generator[_Run]:
        """steps: of the sampler; 0 where each call counts as one."""
        run = _Run(self._policy, self._node_id, steps)
        self._runs.append(run)
        try:
            yield run
        finally:
            self._runs.remove(run)
            run.end()

    def call(self, make_stage: Callable[[], _Stage], *args: Any, **kwargs: Any) -> Any:
        """One guarded call, in the run that is going on; else in one of its own."""
        if self._runs:
            return self._runs[-1].call(make_stage, *args, **kwargs)
        with self.run() as run:
            return run.call(make_stage, *args, **kwargs)


class _Run:
    def __init__(self, policy: GuardPolicy, node_id: str | None, steps: int):
        self._policy = policy
        self._node_id = node_id
        self._steps = steps
        self._guard: StageGuard | None = None

    def call(self, make_stage: Callable[[], _Stage], *args: Any, **kwargs: Any) -> Any:
        self._guard = self._guard or self._guarding(make_stage())
        report = self._guard.report
        before = report.reruns + report.failed
        made = self._guard(*args, **kwargs)
        if report.reruns + report.failed > before:
            last = report.steps[-1]
            host.say(self._node_id, f"call {last.step + 1}: {last.note or last.outcome}")
        return made

    def end(self) -> None:
        """Show the report on the node, and write it to the log."""
        if self._guard is None or not self._guard.report.steps:
            return
        report = self._guard.report
        report.calls_per_step = -(-len(report.steps) // self._steps) if self._steps else 1
        notes = dict.fromkeys(step.note for step in report.steps if step.note)
        text = "\n".join((report.summary(), *list(notes)[:1]))
        host.say(self._node_id, text)
        logger.log(logging.WARNING if notes or report.failed else logging.INFO, "NaN Guard: %s", text)

    def _guarding(self, stage: _Stage) -> StageGuard:
        name, architecture = dtype_name(stage.dtype), detect(stage.device)
        if name not in DTYPES:
            raise BadInput(f"{stage.model} computes in {name}. The NaN Guard knows {', '.join(DTYPES)}.")
        return StageGuard(
            stage.component.value,
            stage.attempt,
            rerun=stage.rerun,
            owner=stage.network,
            dtype=name,
            policy=self._policy,
            report=RunReport(stage.model, str(architecture), _plan(stage.component, stage.model, name)),
            tf32=architecture.tf32,
            peak_inside=stage.peak_inside,
        )


# --- MODEL ------------------------------------------------------------------------------------------------------------


class _ModelGuard(_Guarding):
    """The two wrappers of a MODEL. `executor` goes on with the chain of wrappers, and ends in ComfyUI itself."""

    def sample(self, executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, *more: Any) -> Any:
        with self.run(steps=len(sigmas) - 1):
            return executor(noise, latent_image, sampler, sigmas, *more)

    def apply_model(
        self,
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: torch.Tensor | None = None,
        c_crossattn: torch.Tensor | None = None,
        control: dict[str, Any] | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conditions: Any,
    ) -> Any:
        """x: noisy latents, float32. t: sigma. Returns the denoised latents."""
        given = {"x": x, "c_concat": c_concat, "c_crossattn": c_crossattn, **conditions}
        options = transformer_options or {}
        call = {**given, "timestep": t, "control": control, "transformer_options": options, "memory": _Memory(options)}
        try:
            made = self.call(lambda: _denoiser(executor.class_obj, x.device), executor=executor, **call)
        except GuardStopped as stopped:
            for name, value in given.items():
                if broken := sum(map(non_finite, floating(value))):
                    what = _INPUTS.get(name, f"condition '{name}'")
                    raise GuardStopped(
                        f"The model was given {what} with {broken} non-finite values, so another node made them: "
                        "look at the nodes before the sampler, and at those that change the model."
                    ) from stopped
            raise
        call["memory"].settle()
        return made


_INPUTS = {"x": "latents", "c_concat": "latents to start from", "c_crossattn": "a prompt"}


def _denoiser(model: Any, device: torch.device) -> _Stage:
    """model: ComfyUI's BaseModel."""
    network = getattr(model.diffusion_model, "_orig_mod", model.diffusion_model)  # of a compiled one
    dtype = model.manual_cast_dtype or model.get_dtype()
    clips = _Clips() if dtype is torch.float16 and _clips(network) else None

    def attempt(**call: Any) -> Any:
        with clips or nullcontext():
            return _apply_model(**call)

    return _Stage(
        model=type(model.model_config).__name__,
        component=Component.DENOISER,
        network=network,
        dtype=dtype,
        device=device,
        attempt=attempt,
        rerun=_apply_model_in_fp32,
        peak_inside=clips.take if clips else None,
    )


def _apply_model(
    *, executor: Any, x: Any, timestep: Any, c_concat: Any, c_crossattn: Any, control: Any, memory: _Memory, **more: Any
) -> Any:
    """Goes on with the chain. ControlNet's residuals are taken off their lists as they are used: off a copy, so that
    the call can be made again."""
    memory.rewind()
    options = more.pop("transformer_options")
    control = pytree.tree_map(lambda residual: residual, control)
    return executor(x, timestep, c_concat, c_crossattn, control, options, **more)


def _apply_model_in_fp32(*, executor: Any, transformer_options: dict[str, Any], **call: Any) -> Any:
    _refuse_fp8_products(executor.class_obj.diffusion_model)
    options = {**transformer_options, ATTENTION_OVERRIDE: _attention_in_fp32}
    made = _apply_model(executor=executor, transformer_options=options, **call)
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


def _refuse_fp8_products(network: torch.nn.Module) -> None:
    for name, layer in network.named_modules():
        if type(layer).__qualname__.startswith("fp8_ops.") and layer.weight.dtype is torch.float8_e4m3fn:
            raise RerunUnsupported(
                f"'{name}' multiplies in fp8 (ComfyUI's --fast fp8_matrix_mult), which rounds what goes into it: "
                "a rerun would not be fp32. Start ComfyUI without it."
            )


class _Clips(TorchFunctionMode):
    """Sees the largest |x| that a model hands to `nan_to_num`: Flux and others hide in fp16 what overflowed."""

    def __init__(self) -> None:
        super().__init__()
        self._peaks: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nan_to_num:
            self._peaks.append(largest(args[0]))
        return func(*args, **(kwargs or {}))

    def take(self) -> torch.Tensor | None:
        """Of the latest attempt, as a scalar; inf or NaN where something was hidden."""
        peaks, self._peaks = self._peaks, []
        return torch.stack(peaks).amax() if peaks else None


def _clips(network: torch.nn.Module) -> bool:
    forwards = (getattr(type(layer).forward, "__code__", None) for layer in network.modules())
    return any("nan_to_num" in code.co_names for code in forwards if code)


# --- VAE --------------------------------------------------------------------------------------------------------------


def _guarded_network(
    guard: _Guarding, vae: Any, component: Component, method: Callable[..., Any]
) -> Callable[..., Any]:
    network = vae.first_stage_model

    def stage() -> _Stage:
        return _Stage(type(network).__name__, component, network, vae.vae_dtype, vae.device, method, method)

    return functools.wraps(method)(lambda *args, **kwargs: guard.call(stage, *args, **kwargs))


def _as_one_run(guard: _Guarding, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with guard.run():
            return method(*args, **kwargs)

    return run


def _plan(component: Component, model: str, dtype: str) -> Plan:
    """Of a stage whose dtype ComfyUI chose."""
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
