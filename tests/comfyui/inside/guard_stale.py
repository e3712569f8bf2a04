"""NaN Guard with stale weights on the card: results are NaN in fp32 too, until ComfyUI loads the weights again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import lora_of_a_prompt, lora_on
from guard_streamed import LINEAR, with_lora
from in_comfyui import as_comfyui_code, counting_loads, difference, error_of, guarded, module, texts, wrapped
from native_models import LAYOUTS, in_fp32, make_model, sample
from simulated_card import CARD, DYNAMIC, HOST, MANAGEMENT, card, on_host

NOTE = "NaN or infinite in fp32 too: the weights were reloaded, "
OTHER = "diffusion_model.output_blocks.0.1.transformer_blocks.0.ff.net.2"
Spoil = Callable[[Any], None]  # of a ModelPatcher


def spoiled(patcher: Any, spoil: Spoil) -> Any:
    """Return a clone whose weights on the card become stale before the network's third call."""
    calls: list[int] = []

    @as_comfyui_code
    def spoil_at_third_call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            spoil(patcher)
        return executor(*args, **kwargs)

    return wrapped(patcher, spoil_at_third_call)


def spoil_patched(patcher: Any) -> None:
    """Overwrite the weights with a merged LoRA; the host has the originals."""
    assert patcher.backup
    for key in patcher.backup:
        patcher.model.get_parameter(key).data.fill_(torch.nan)


def spoil_pages(patcher: Any) -> None:
    """Overwrite everything in dynamic VRAM: the card's pages, and their pinned copies on the host."""
    for pages in patcher.model.dynamic_vbars.values():
        assert pages.loaded_size() > 0
        pages.overwrite()
    for pins in patcher.model.dynamic_pins.values():
        for buffer in (pins["weights"][0], pins["weights-loaded"][0]):
            buffer.overwrite()


@pytest.mark.parametrize(("family", "dtype"), [("sd15", "fp32"), ("anima", "fp16"), ("sensenova", "fp16")])
def test_stale_weights_of_fp32_and_text_models_are_reloaded(family: str, dtype: str) -> None:
    """Models that prepare text sample with a view of the model on the card."""
    if family not in LAYOUTS:
        pytest.skip("this ComfyUI has none")
    model = lora_on(make_model(family, torch.float32 if dtype == "fp32" else torch.float16))
    expected = sample(model)
    assert torch.equal(sample(guarded(spoiled(model, spoil_patched))), expected)
    assert f"{NOTE}after that {dtype} was finite" in texts[-1]


@pytest.mark.parametrize(
    "dynamic",
    [False, pytest.param(True, marks=pytest.mark.skipif(not DYNAMIC, reason="this ComfyUI has no dynamic VRAM"))],
)
@pytest.mark.parametrize("hot", [False, True])
def test_reload_of_stale_weights_retries_fp16_before_fp32(hot: bool, dynamic: bool) -> None:
    if dynamic:
        model = make_model("sd15", hot=hot)
        expected = sample(in_fp32(model) if hot else model)
        around, stale = partial(card, dynamic=True), lambda: spoiled(on_host(model, dynamic=True), spoil_pages)
    else:
        model = with_lora(make_model("sd15", hot=hot))
        expected = sample(guarded(model) if hot else model)
        around, stale = nullcontext, lambda: spoiled(model, spoil_patched)
    with around(), counting_loads() as loads:
        made = sample(guarded(stale()))
    if hot:
        assert difference(made, expected) <= 1e-5
        assert f"{NOTE}and the step recomputed in fp32" in texts[-1] and "3 steps, 3 recomputed in fp32" in texts[-1]
    else:
        assert torch.equal(made, expected)
        assert f"{NOTE}after that fp16 was finite" in texts[-1] and "3 steps, all fine" in texts[-1]
        assert len(loads) == 2  # the run's load and one reload


def test_lora_of_one_prompt_is_applied_again_after_reload() -> None:
    patcher, hooks = with_lora(make_model("sd15")), lora_of_a_prompt(OTHER, inputs=256, strength=1.0)
    without, expected = sample(patcher), sample(patcher, hooks=hooks)
    assert difference(without, expected) > 2e-2
    assert torch.equal(sample(guarded(spoiled(patcher, spoil_patched)), hooks=hooks), expected)


def test_reload_keeps_amount_of_weights_on_card() -> None:
    """Some layers are on the card, others are streamed to it."""
    patcher = with_lora(import_module("comfy.model_patcher").ModelPatcher(make_model("sd15").model, CARD, HOST))
    before: list[int] = []

    def spoil(patcher: Any) -> None:
        before.append(patcher.loaded_size())
        spoil_patched(patcher)

    with card(free=lambda: 0.9 * patcher.model_size() - patcher.loaded_size()):
        expected = sample(patcher)
        assert torch.equal(sample(guarded(spoiled(patcher, spoil))), expected)
        after = patcher.loaded_size()
    if DYNAMIC:  # older ComfyUIs load 64 MB and more
        assert 0.95 * before[0] < after <= before[0] < patcher.model_size()


def test_broken_weight_is_reloaded_once_and_broken_input_never() -> None:
    broken, stale = make_model("sd15"), with_lora(make_model("sd15"))
    broken.model.get_parameter(LINEAR)[0, 0] = torch.nan
    nan = torch.full(LAYOUTS["sd15"].latents, torch.nan)
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(broken)))
    assert error.startswith("GuardStopped") and len(loads) == 2
    assert "ff.net.2.weight' holds 1 NaN or infinite values (of 16384)" in error
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(make_model("sd15")), latents=nan))
    assert "received latents with 512 NaN or infinite values" in error and len(loads) == 1
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(spoiled(stale, spoil_patched), on_failure="stop")))
    assert "set to 'stop'" in error and len(loads) == 1


@pytest.mark.parametrize("inserted", [False, True])
def test_failed_reload_gives_error_or_nan_and_next_run_works(inserted: bool) -> None:
    """When a reload fails, ComfyUI has already removed the LoRA: later steps would use another model."""
    model = with_lora(make_model("sd15"))
    expected, load = sample(model), MANAGEMENT.LoadedModel.model_load
    loads: list[str] = []

    def model_load(loaded: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(type(loaded.model.model).__name__)
        if len(loads) == 2:
            raise torch.OutOfMemoryError("none left")
        return load(loaded, *args, **kwargs)

    made: list[torch.Tensor] = []
    with patch.object(MANAGEMENT.LoadedModel, "model_load", model_load):
        behind = guarded(spoiled(model, spoil_patched), inserted=inserted)
        error = error_of(lambda: made.append(sample(behind)))
    assert len(loads) == 2
    assert made[0].isnan().all() if inserted else error == "OutOfMemoryError: none left"
    assert torch.equal(sample(guarded(model)), expected)


def test_unloaded_or_compiled_model_is_not_reloaded() -> None:
    loaded_anew = module("comfyui_host.rerun_layers").loaded_anew
    patcher = make_model("sd15")
    assert not loaded_anew(patcher.model)
    MANAGEMENT.load_models_gpu([patcher])
    block = patcher.model.diffusion_model.out
    patcher.model.diffusion_model.out = torch.compile(block, backend="eager")
    assert not loaded_anew(patcher.model)
    patcher.model.diffusion_model.out = block
    assert loaded_anew(patcher.model)
