"""What happens to a MODEL with and without the guard: run in ComfyUI's interpreter, judged in test_native_model.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import LAYOUTS, Layout, in_fp32, make_model, sample

SD15, FLUX = LAYOUTS["sd15"], LAYOUTS["flux"]
EXTENSION = import_module("comfy.patcher_extension")
KINDS = EXTENSION.WrappersMP
STEPS = 3


def guarded(patcher: Any, **policy: Any) -> Any:
    return node("model", patcher, **policy)


@contextmanager
def counting(patcher: Any) -> Iterator[list[torch.dtype]]:
    """The dtype of each call of the diffusion model, as it sees its input."""
    seen: list[torch.dtype] = []
    hook = patcher.model.diffusion_model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    try:
        yield seen
    finally:
        hook.remove()


def case_report() -> dict[str, Any]:
    """What is said while it samples, and after it."""
    found: dict[str, Any] = {}
    for name in ("sd15", "flux"):
        said.clear()
        sample(guarded(make_model(LAYOUTS[name], hot=True)), LAYOUTS[name])
        found[name] = list(said)
    return found


def case_comes_off() -> dict[str, Any]:
    """The MODEL that went in, after its guarded clone has sampled and reran."""
    patcher = make_model(SD15, hot=True)
    sample(patcher, SD15)  # ComfyUI notes on the layers that they are loaded
    before = _state(patcher)
    clone = guarded(patcher)
    sample(clone, SD15)
    twice = guarded(clone)
    kinds = (KINDS.OUTER_SAMPLE, KINDS.APPLY_MODEL)
    return {
        "unchanged": before == _state(patcher),
        "plain": sample(patcher, SD15),
        "wrappers": [len(twice.get_all_wrappers(kind)) for kind in kinds],
    }


def _state(patcher: Any) -> list[Any]:
    model = patcher.model
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules()]
    names = [sorted(vars(layer)) for layer in model.modules()]
    weights = [(name, weight.dtype, weight.data_ptr()) for name, weight in model.state_dict().items()]
    return [repr(patcher.wrappers), repr(patcher.model_options), repr(patcher.object_patches), hooks, names, weights]


def case_policies() -> dict[str, Any]:
    results: dict[str, Any] = {}
    patcher = make_model(SD15, hot=True)
    results["stop"] = error_of(lambda: sample(guarded(patcher, on_failure="stop"), SD15))
    said.clear()
    results["off"] = sample(guarded(patcher, on_failure="off"), SD15)
    results["off said"] = list(said)
    for scope in ("step", "run"):
        with counting(patcher) as seen:
            results[f"scope {scope}"] = sample(guarded(patcher, scope=scope), SD15)
        results[f"scope {scope} calls"] = [str(dtype) for dtype in seen]
    results["the last node counts"] = sample(guarded(guarded(patcher, on_failure="stop")), SD15)
    return results


def case_hopeless() -> dict[str, Any]:
    """What no precision helps."""
    broken = make_model(SD15)
    broken.model.diffusion_model.input_blocks[1][0].in_layers[2].weight[0, 0] = torch.inf
    single = make_model(SD15, torch.float32)
    single.model.diffusion_model.input_blocks[1][0].in_layers[2].weight[0, 0] = torch.nan
    latents, pooled = torch.full(SD15.latents, torch.nan), torch.full((1, 24), torch.nan)
    return {
        "weight": error_of(lambda: sample(guarded(broken), SD15)),
        "weight in fp32": error_of(lambda: sample(guarded(single), SD15)),
        "latents": error_of(lambda: sample(guarded(make_model(SD15)), SD15, latents=latents)),
        "prompt": error_of(lambda: sample(guarded(make_model(FLUX)), FLUX, pooled_output=pooled)),
        "afterwards": sample(guarded(make_model(SD15)), SD15),
    }


class Residuals:
    """Stands in for a ControlNet: what it gives is taken off its lists by the model as it is used."""

    def __init__(self, layout: Layout) -> None:
        self._shape = layout.latents

    def __call__(self, apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        batch, _, height, width = call["input"].shape
        generator = torch.Generator().manual_seed(9)
        middle = torch.randn((batch, 64, height // 2, width // 2), generator=generator)
        return apply_model(call["input"], call["timestep"], **call["c"] | {"control": {"middle": [5 * middle]}})


def case_control() -> dict[str, Any]:
    """The rerun has the residuals too, although the attempt used them up."""
    hot = make_model(SD15, hot=True)
    results: dict[str, Any] = {"without": sample(in_fp32(hot, SD15), SD15)}
    for name, patcher in (("guarded", guarded(hot)), ("fp32", in_fp32(hot, SD15))):
        controlled = patcher.clone()
        controlled.set_model_unet_function_wrapper(Residuals(SD15))
        results[name] = sample(controlled, SD15)
    return results


def case_newer() -> dict[str, Any]:
    """ComfyUI 0.12 hands on `latent_shapes` too, by name."""
    handed_on: dict[str, Any] = {}
    patcher = guarded(make_model(SD15))
    guider = import_module("comfy.samplers").CFGGuider(patcher)
    wrappers = patcher.get_all_wrappers(KINDS.OUTER_SAMPLE)
    ends_in = lambda *_args, **by_name: handed_on.update(by_name)  # noqa: E731
    executor = EXTENSION.WrapperExecutor.new_class_executor(ends_in, guider, wrappers)
    executor.execute(None, None, None, [1.0, 0.0], latent_shapes=[(1, 4)])
    return {"handed on": handed_on}
