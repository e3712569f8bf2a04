"""Numerics Probe (MODEL) on small models of ComfyUI's own: measurements, recommendations, profiles, errors."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import NODE_ID, error_of, guarded, on, pack_node, texts, wrapped
from native_models import CARD, LAYOUTS, make_model, prompts, sample, with_fp32_twin

STEPS = 3
THIS_CARD = "cpu" if CARD.type == "cpu" else "sm86"  # a card with bf16
STATES = {  # dtype of the weights, and the dtype they are cast to
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "fp32 computed in fp16": (torch.float32, torch.float16),
    "fp8 computed in bf16": (torch.float8_e4m3fn, torch.bfloat16),
}


def probed(patcher: Any, **given: Any) -> dict[str, Any]:
    layout = patcher.model.layout
    positive, negative = prompts(layout)
    wired = {"model": patcher, "positive": positive, "negative": negative, "node_id": NODE_ID}
    settings = {"steps": STEPS, "cfg": layout.cfg, "sampler_name": "euler", "scheduler": layout.scheduler, "seed": 1}
    latent = {"samples": torch.zeros(layout.latents)}
    texts.clear()
    with torch.inference_mode():
        return pack_node("NumericsProbeModel", **wired | {"latent_image": latent} | settings | given)


def facts(shown: dict[str, Any]) -> dict[str, Any]:
    return shown["ui"]["onediff_guard"][0]


@pytest.mark.parametrize("family", ["sd15", "sdxl", "svd", "flux", "wan"])
def test_probe_names_overflowing_layer_and_recommends_working_dtype(family: str) -> None:
    layout, (patcher, twin) = LAYOUTS[family], with_fp32_twin(family, hot=True)
    with on(THIS_CARD):
        shown = probed(patcher)
    picture, text, profile = shown["result"]
    check_shown(picture, text)
    found = facts(shown)
    worst = next(entry for entry in found["worst"] if entry["name"] == layout.hot)
    assert worst["reach"] == pytest.approx(_measured_peak(twin, layout.hot), rel=1e-3)
    assert worst["reach"] > 65504 and found["measured_steps"] == STEPS
    fp16 = next(verdict for verdict in found["verdicts"] if verdict["dtype"] == "fp16")
    assert fp16["fits"] and fp16["plan"] == "fp16 with overflow protection"
    assert (layout.block if "blocks.0" in layout.block else "input_blocks.1") in fp16["reason"]
    assert found["dtype"] == "bf16", "computed natively"
    assert "put NaN Guard (native) after the model, with precision 'bf16'" in text
    assert profile == "", "bf16 needs no profile"
    for precision in ("bf16", "fp16"):
        with on(THIS_CARD):
            assert sample(guarded(patcher, precision=precision)).isfinite().all()
        assert f"{STEPS} steps, all fine" in texts[-1] and f"{precision}, as you chose" in texts[-1]


def check_shown(picture: torch.Tensor, text: str) -> None:
    assert picture.ndim == 4 and picture.shape[-1] == 3 and picture.dtype == torch.float32
    assert picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0.05
    steps = [line.partition(" · ")[0] for line in texts[:STEPS]]  # the rest is the remaining time
    assert steps == [f"step {step}/{STEPS}, measured in fp32" for step in range(1, STEPS + 1)]
    assert texts[STEPS:] == [text]


@pytest.mark.parametrize("family", ["sd15", "sdxl", "svd", "flux", "wan"])
def test_probe_profile_prevents_reruns_only_on_its_card(family: str) -> None:
    patcher = make_model(family, hot=True)
    with on("sm75"):
        _, text, profile = probed(patcher)["result"]
        assert "fp16 with overflow protection" in text and "`profile` connected to its `profile`" in text
        assert sample(guarded(patcher, scope="learned", profile=profile)).isfinite().all()
        (report,) = texts
        assert f"overflow protection; {STEPS} steps, all fine" in report and "from a profile: " in report
    with on(THIS_CARD):
        sample(guarded(patcher, scope="learned", profile=profile))
    assert f"the given profile is not used: it is for sm75, but this is {THIS_CARD}" in texts[-1]
    assert f"{STEPS} steps, 1 recomputed in fp32" in texts[-1]


def _measured_peak(patcher: Any, name: str) -> float:
    """Return the largest output of a layer, measured with a hook in a run without the probe."""
    layout, reached = patcher.model.layout, list[float]()
    layer = patcher.model.diffusion_model.get_submodule(name)
    hook = layer.register_forward_hook(lambda _layer, _given, made: reached.append(made.abs().max().item()))
    positive, negative = prompts(layout)
    noise = import_module("comfy.sample").prepare_noise(torch.zeros(layout.latents), 1)
    given = (patcher, noise, STEPS, layout.cfg, "euler", layout.scheduler, positive, negative)
    with torch.inference_mode():
        import_module("comfy.sample").sample(*given, torch.zeros(layout.latents), seed=1, disable_pbar=True)
    hook.remove()
    return max(reached)


@pytest.mark.parametrize("state", STATES)
def test_probe_recommends_current_dtype_for_healthy_model(state: str) -> None:
    found = facts(probed(make_model("sd15", *STATES[state])))
    assert found["dtype"] == state.rpartition(" ")[2]
    assert all(verdict["fits"] for verdict in found["verdicts"])
    assert found["seconds"] > 0


@pytest.mark.parametrize(
    ("family", "latent"),
    {
        "sd15": {"samples": torch.zeros(1, 64, 4, 4), "downscale_ratio_spacial": 16},
        "wan": {"samples": torch.zeros(1, 16, 1, 4, 4), "downscale_ratio_spacial": 16, "downscale_ratio_temporal": 8},
    }.items(),
    ids=str,
)
def test_probe_resizes_empty_latent_as_ksampler_does(family: str, latent: dict[str, Any]) -> None:
    shapes = set[Any]()

    def look(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.add(tuple(x.shape))
        return executor(x, *args, **kwargs)

    patcher, layout = wrapped(make_model(family), look, "apply_model"), LAYOUTS[family]
    probed(patcher, latent_image=latent)
    by_the_probe = {*shapes}
    shapes.clear()
    given = (1, STEPS, layout.cfg, "euler", layout.scheduler, *prompts(layout), latent)
    with torch.inference_mode():
        (made,) = import_module("nodes").KSampler().sample(patcher, *given)
    assert by_the_probe == shapes
    assert {shape[1:] for shape in shapes} == {tuple(made["samples"].shape[1:])}


def test_probe_leaves_model_unchanged_and_ignores_guard() -> None:
    patcher = make_model("sd15")
    before, behind = sample(patcher), guarded(patcher)
    found = facts(probed(behind))
    assert len(texts) == STEPS + 1
    texts.clear()
    assert torch.equal(before, sample(patcher)) and torch.equal(before, sample(behind))
    assert any(", all fine." in text for text in texts)
    assert found["worst"] == facts(probed(patcher))["worst"]
    assert not any(layer._forward_hooks for layer in patcher.model.modules())


INTERRUPT = import_module("comfy.model_management").InterruptProcessingException()


@pytest.mark.parametrize(
    ("where", "step", "error"),
    [
        ("extra_conds", 1, KeyError("pooled_output")),
        ("layer", 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
        ("network", 2, ValueError()),
        ("sampler", 3, RuntimeError("of the test")),
        ("network", 2, torch.OutOfMemoryError("none left")),  # ComfyUI has its own message for it
        ("layer", 2, INTERRUPT),
        ("extra_conds", 1, INTERRUPT),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else str(each),
)
def test_model_error_is_reported_with_step_and_next_run_works(where: str, step: int, error: BaseException) -> None:
    is_reported = not isinstance(error, (torch.OutOfMemoryError, type(INTERRUPT)))
    patcher, calls = make_model("sd15"), list[int]()
    before, expected = sample(patcher), facts(probed(patcher))["worst"]
    module = patcher.model.diffusion_model.get_submodule({"layer": "middle_block.1"}.get(where, ""))

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(1)
        if where in ("extra_conds", "sampler") or len(calls) == 2:
            raise error

    def sampler(model: Any, x: torch.Tensor, sigmas: Any, extra_args: Any, callback: Any, **_: Any) -> Any:
        for step in range(2):
            made = model(x, sigmas[step] * x.new_ones(len(x)), **extra_args)
            callback({"i": step, "denoised": made, "x": x})
        fail()

    owner = {
        "extra_conds": (type(patcher.model), "extra_conds", fail),
        "sampler": (import_module("comfy.k_diffusion.sampling"), "sample_euler", sampler),
    }.get(where)
    hooks = [] if owner else [module.register_forward_pre_hook(fail)]
    with patch.object(*owner) if owner else nullcontext(), pytest.raises((RuntimeError, type(error))) as ended:
        probed(patcher)
    for hook in hooks:
        hook.remove()
    if is_reported:
        text, why = str(ended.value), f": {error}" if str(error) else ""
        found = (
            f"The probe of SD15 failed in step {step} of {STEPS}: {type(error).__name__}{why}. The probe samples like"
        )
        assert text.startswith(found)
        assert "Run KSampler with the same inputs" in text and ended.value.__cause__ is error
    else:
        assert ended.value is error
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in patcher.model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(before, sample(patcher)) and facts(probed(patcher))["worst"] == expected
    error.with_traceback(None)  # its frames keep the model alive


def test_bad_input_is_named_and_next_run_works() -> None:
    broken, layer = make_model("sd15"), "input_blocks.1.0.in_layers.2"
    broken.model.diffusion_model.get_submodule(layer).weight[0, 0] = torch.inf
    assert f"'{layer}.weight' holds" in error_of(lambda: probed(broken))
    nan = {"samples": torch.full(LAYOUTS["sd15"].latents, torch.nan)}
    error = error_of(lambda: probed(make_model("sd15"), latent_image=nan))
    assert "received latents with 512 NaN or infinite values" in error
    error = error_of(lambda: probed(make_model("sd15", torch.float64)))
    assert error.startswith("BadInput: SD15 computes in float64")
    assert facts(probed(make_model("sd15")))["dtype"] == "fp16"
