"""NaN Guard where the weights on the card are not what the host has: NaN in fp32 too, until ComfyUI loads them anew."""

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
from in_comfyui import counting_loads, difference, error_of, guarded, module, said, witness, wrapped
from native_models import LAYOUTS, in_fp32, make_model, sample
from simulated_card import CARD, DYNAMIC, HOST, MANAGEMENT, card, on_host

ANEW = "NaN or infinite in fp32 too: the weights were loaded again, "
OTHER = "diffusion_model.output_blocks.0.1.transformer_blocks.0.ff.net.2"
Spoil = Callable[[Any], None]  # of a ModelPatcher


def spoiled(patcher: Any, spoil: Spoil) -> Any:
    """A clone whose weights on the card are made stale before the third call of the network."""
    calls: list[int] = []

    @witness
    def spoils(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            spoil(patcher)
        return executor(*args, **kwargs)

    return wrapped(patcher, spoils)


def spoil_patched(patcher: Any) -> None:
    """Those into which a LoRA was patched, of which the host has the originals."""
    assert patcher.backup
    for key in patcher.backup:
        patcher.model.get_parameter(key).data.fill_(torch.nan)


def spoil_pages(patcher: Any) -> None:
    """All that dynamic VRAM holds: the card's pages, and the pinned copies that they are filled from."""
    for pages in patcher.model.dynamic_vbars.values():
        assert pages.loaded_size() > 0
        pages.overwrite()
    for pins in patcher.model.dynamic_pins.values():
        for buffer in (pins["weights"][0], pins["weights-loaded"][0]):
            buffer.overwrite()


@pytest.mark.parametrize(("family", "dtype"), [("sd15", "fp32"), ("anima", "fp16"), ("sensenova", "fp16")])
def test_so_they_are_in_fp32_and_for_a_model_that_prepares_text(family: str, dtype: str) -> None:
    """What samples is in the latter case a view of the model that is on the card."""
    if family not in LAYOUTS:
        pytest.skip("this ComfyUI has none")
    model = lora_on(make_model(family, torch.float32 if dtype == "fp32" else torch.float16))
    expected = sample(model)
    assert torch.equal(sample(guarded(spoiled(model, spoil_patched))), expected)
    assert f"{ANEW}after that {dtype} was finite" in said[-1]


@pytest.mark.parametrize(
    "dynamic",
    [False, pytest.param(True, marks=pytest.mark.skipif(not DYNAMIC, reason="this ComfyUI has no dynamic VRAM"))],
)
@pytest.mark.parametrize("hot", [False, True])
def test_weights_are_loaded_anew_and_what_fits_fp16_is_right_in_it(hot: bool, dynamic: bool) -> None:
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
        assert f"{ANEW}and the step recomputed in fp32" in said[-1] and "3 steps, 3 recomputed in fp32" in said[-1]
    else:
        assert torch.equal(made, expected)
        assert f"{ANEW}after that fp16 was finite" in said[-1] and "3 steps, all fine" in said[-1]
        assert len(loads) == 2  # the run's own, and one more


def test_a_lora_of_one_prompt_is_in_it_again() -> None:
    patcher, hooks = with_lora(make_model("sd15")), lora_of_a_prompt(OTHER, inputs=256, strength=1.0)
    without, expected = sample(patcher), sample(patcher, hooks=hooks)
    assert difference(without, expected) > 2e-2
    assert torch.equal(sample(guarded(spoiled(patcher, spoil_patched)), hooks=hooks), expected)


def test_as_much_is_on_the_card_afterwards() -> None:
    """Some layers on the card, others brought to it as they run."""
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


def test_what_no_loading_helps_is_named_as_ever_and_nothing_is_loaded_where_none_is_needed() -> None:
    broken, stale = make_model("sd15"), with_lora(make_model("sd15"))
    broken.model.get_parameter(LINEAR)[0, 0] = torch.nan
    nan = torch.full(LAYOUTS["sd15"].latents, torch.nan)
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(broken)))
    assert error.startswith("GuardStopped") and len(loads) == 2
    assert "ff.net.2.weight' holds 1 NaN or infinite values of 16384" in error
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(make_model("sd15")), latents=nan))
    assert "was given latents with 512 NaN or infinite values" in error and len(loads) == 1
    with counting_loads() as loads:
        error = error_of(lambda: sample(guarded(spoiled(stale, spoil_patched), on_failure="stop")))
    assert "set to stop" in error and len(loads) == 1


@pytest.mark.parametrize("inserted", [False, True])
def test_a_model_whose_loading_fails_computes_nothing_more_in_that_run(inserted: bool) -> None:
    """ComfyUI has taken its LoRA out by then: all steps from there on would be those of another model."""
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


def test_what_others_loaded_or_runs_compiled_is_left_alone() -> None:
    loaded_anew = module("comfyui_host.layers").loaded_anew
    patcher = make_model("sd15")
    assert not loaded_anew(patcher.model)
    MANAGEMENT.load_models_gpu([patcher])
    block = patcher.model.diffusion_model.out
    patcher.model.diffusion_model.out = torch.compile(block, backend="eager")
    assert not loaded_anew(patcher.model)
    patcher.model.diffusion_model.out = block
    assert loaded_anew(patcher.model)
