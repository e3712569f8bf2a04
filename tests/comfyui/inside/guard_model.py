"""NaN Guard (native) on small models of ComfyUI's own: reruns, reports, policies, errors, and unchanged inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, error_of, guarded, texts
from native_models import LAYOUTS, make_model, sample, with_fp32_twin

STEPS = 3
HOT = "input_blocks.1.0.in_layers.2"


@contextmanager
def counting(patcher: Any) -> Iterator[list[torch.dtype]]:
    """Record the input dtype of each call of the diffusion model."""
    seen: list[torch.dtype] = []
    hook = patcher.model.diffusion_model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize(("family", "layer"), {"sd15": HOT, "flux": "double_blocks.0.txt_mlp.2"}.items())
def test_each_rerun_is_shown_and_report_names_layer(family: str, layer: str) -> None:
    sample(guarded(make_model(family, hot=True)))
    assert f"'{layer}' reaches" in texts[-1]
    assert f"{STEPS} steps, {STEPS} recomputed in fp32" in texts[-1]
    assert len(texts) == STEPS + 1 and texts[0].startswith("call 1: NaN or infinite in fp16")


@pytest.mark.parametrize(
    ("calls", "said"),
    [([2, 2, 1], "3 steps, 5 of 5 calls recomputed"), ([2, 1, 1], "4 calls, 4 recomputed")],
)
def test_report_counts_calls_if_steps_cannot_be_told_apart(calls: list[int], said: str) -> None:
    """Skip Layer Guidance calls the model again in a part of the steps, and Heun's method in all but the last."""
    model, left = make_model("sd15", hot=True), calls[::-1]

    def several(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        made, *_ = (apply_model(call["input"], call["timestep"], **call["c"]) for _ in range(left.pop()))
        return made

    model.set_model_unet_function_wrapper(several)
    sample(guarded(model))
    assert f"; {said} in fp32." in texts[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_learning_guard_recomputes_only_one_step(dtype: torch.dtype) -> None:
    """One layer fails in half precision. Afterwards every layer is scaled, also in bf16."""
    patcher, twin = with_fp32_twin("sd15", dtype)
    layer = patcher.model.diffusion_model.get_submodule(HOT)
    hook = layer.register_forward_hook(lambda _, __, made: made * torch.inf if made.dtype is dtype else None)
    try:
        made = sample(guarded(patcher, scope="learned"))
    finally:
        hook.remove()
    assert f"{STEPS} steps, 1 recomputed in fp32" in texts[-1] and "overflow protection from here on" in texts[-1]
    assert difference(made, sample(twin)) <= (2e-2 if dtype is torch.bfloat16 else 5e-3)


def test_input_model_is_not_changed() -> None:
    patcher = make_model("sd15", hot=True)
    sample(patcher)  # ComfyUI marks layers as loaded
    before = _state(patcher)
    clone = guarded(patcher)
    sample(clone)
    assert before == _state(patcher)
    assert torch.isnan(sample(patcher)).all()
    wrappers = [guarded(clone).get_all_wrappers(kind) for kind in ("outer_sample", "apply_model")]
    assert [len(each) for each in wrappers] == [1, 1]  # the second guard replaced the first


def _state(patcher: Any) -> list[Any]:
    model = patcher.model
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules()]
    names = [sorted(vars(layer)) for layer in model.modules()]
    weights = [(name, weight.dtype, weight.data_ptr()) for name, weight in model.state_dict().items()]
    return [repr(patcher.wrappers), repr(patcher.model_options), repr(patcher.object_patches), hooks, names, weights]


def test_guard_follows_on_failure_and_scope() -> None:
    patcher = make_model("sd15", hot=True)
    stopped = error_of(lambda: sample(guarded(patcher, on_failure="stop")))
    assert "call 1" in stopped and "set to 'stop'" in stopped
    assert "1 call, 1 with NaN, infinite or clipped values; ended by the NaN Guard at call 1." in texts[-1]
    assert torch.isnan(sample(guarded(patcher, on_failure="off"))).all()
    assert f"{STEPS} steps, {STEPS} with NaN, infinite or clipped values: " in texts[-1]
    with counting(patcher) as seen:
        step = sample(guarded(patcher, scope="step"))
    half, single = torch.float16, torch.float32
    finding_layer = [half]  # one call to find the failing layer
    assert seen in ([half, single] * STEPS, [half, single, *finding_layer, *[half, single] * 2])
    with counting(patcher) as seen:
        assert torch.equal(sample(guarded(patcher, scope="run")), step)
    assert seen == [half, single, single, single]
    assert torch.equal(sample(guarded(guarded(patcher, on_failure="stop"))), step)  # the last guard decides


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, torch.inf), (torch.float32, torch.nan)])
def test_damaged_weight_is_named_in_error(dtype: torch.dtype, value: float) -> None:
    broken = make_model("sd15", dtype)
    broken.model.diffusion_model.get_submodule(HOT).weight[0, 0] = value
    error = error_of(lambda: sample(guarded(broken)))
    assert error.startswith("GuardStopped") and f"'{HOT}.weight' holds" in error


def test_broken_input_is_named_in_error() -> None:
    behind, flux = guarded(make_model("sd15")), guarded(make_model("flux"))
    latents, pooled = torch.full(LAYOUTS["sd15"].latents, torch.nan), torch.full((1, 24), torch.nan)
    error = error_of(lambda: sample(behind, latents=latents))
    assert "received latents with 512 NaN or infinite values" in error
    error = error_of(lambda: sample(flux, pooled_output=pooled))
    assert "received condition 'y' with 24 NaN or infinite values" in error
    assert sample(behind).isfinite().all()


def test_new_sampler_arguments_are_passed_on() -> None:
    """ComfyUI 0.12 also passes `latent_shapes`, by name."""
    passed_on: dict[str, Any] = {}
    patcher = guarded(make_model("sd15"))
    guider = import_module("comfy.samplers").CFGGuider(patcher)
    wrappers = patcher.get_all_wrappers("outer_sample")
    ends_in = lambda *_args, **by_name: passed_on.update(by_name)  # noqa: E731
    make_executor = import_module("comfy.patcher_extension").WrapperExecutor.new_class_executor
    executor = make_executor(ends_in, guider, wrappers)
    executor.execute(None, None, None, [1.0, 0.0], latent_shapes=[(1, 4)])
    assert passed_on == {"latent_shapes": [(1, 4)]}


@pytest.mark.parametrize("policy", [{}, {"inserted": True}, {"precision": "fp16"}])
@pytest.mark.parametrize("hot", [False, True])
def test_call_with_gradient_is_bit_equal_to_unguarded_call(hot: bool, policy: dict[str, Any]) -> None:
    """Guidance by a loss computes gradients. A rerun has no gradient, so it would change the result."""
    model, gradients = make_model("sd15", hot=hot), list[torch.Tensor]()

    def guided(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            given = {name: value.clone() for name, value in call["c"].items() if isinstance(value, torch.Tensor)}
            x = call["input"].clone().requires_grad_()
            made = apply_model(x, call["timestep"].clone(), **call["c"] | given)
            (gradient,) = torch.autograd.grad(made.square().mean(), x)
        gradients.append(gradient)
        return made.detach()

    model.set_model_unet_function_wrapper(guided)
    plain = sample(model)
    made = sample(guarded(model, **policy))
    assert torch.equal(made.nan_to_num(), plain.nan_to_num())
    assert all(map(torch.equal, *([each.nan_to_num() for each in part] for part in (gradients[:3], gradients[3:]))))
    assert policy.get("inserted") or "Not guarded: calls through which a node computes a gradient" in texts[-1]


@pytest.mark.parametrize("on_failure", ["stop", "rerun"])
def test_report_shows_failure_when_caller_catches_error(on_failure: str) -> None:
    model = make_model("sd15", hot=True)

    def catch_errors(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        x = call["input"] if on_failure == "stop" else call["input"] * torch.inf
        with suppress(Exception):
            return apply_model(x, call["timestep"], **call["c"])
        return torch.zeros_like(x)

    model.set_model_unet_function_wrapper(catch_errors)
    assert sample(guarded(model, on_failure=on_failure)).isfinite().all()
    assert f"{STEPS} with NaN, infinite or clipped values: the result is broken" in texts[-1]
