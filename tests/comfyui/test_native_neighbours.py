"""NaN Guard (native) beside other packs' wrappers, EasyCache, LoRAs, lowvram, torch.compile and each attention."""

from __future__ import annotations

import native
import pytest
import torch


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_neighbour_cases", tmp_path_factory.mktemp("native_neighbours"), leg=leg)


@pytest.mark.parametrize("order", ["before", "after"])
def test_other_packs_wrappers_are_called_in_the_rerun_too(ran: native.Ran, order: str) -> None:
    assert ran[f"wrappers/{order}, called"] == ["apply_model", "diffusion_model", "unet function"]
    assert native.difference(ran["wrappers/fp32, not wrapped"], ran["wrappers/fp32"]) > 2e-2  # they have an effect
    assert native.difference(ran[f"wrappers/{order}, guarded"], ran["wrappers/fp32"]) <= 1e-3


def test_easycache_does_not_skip_a_rerun(ran: native.Ran) -> None:
    assert native.difference(ran["easycache/plain"], ran["easycache/fp32"]) > 2e-2
    assert native.difference(ran["easycache/guarded"], ran["easycache/fp32"]) <= 2e-2
    assert ran["easycache/fp32 calls"] < 8  # it does skip steps


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_is_in_the_rerun(ran: native.Ran, order: str) -> None:
    assert native.difference(ran["lora/fp32 without"], ran["lora/fp32"]) > 2e-2
    assert native.difference(ran[f"lora/{order}, guarded"], ran["lora/fp32"]) <= 2e-3  # ComfyUI rounds it to fp16
    assert ran["lora/unchanged"]


def test_weights_that_are_cast_as_it_goes_are_in_fp32_in_the_rerun(ran: native.Ran) -> None:
    assert ran["lora/lowvram layers"] > 10
    assert native.difference(ran["lora/lowvram, guarded"], ran["lora/lowvram, fp32"]) <= 1e-5


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_model_is_guarded(ran: native.Ran, order: str) -> None:
    assert torch.equal(ran[f"compile/healthy, {order}"], ran["compile/healthy, plain"])
    assert torch.equal(ran[f"compile/hot, {order}"], ran["compile/hot, fp32"])
    assert torch.equal(ran[f"compile/clipping, {order}"], ran["compile/clipping, fp32"])


@pytest.mark.parametrize("name", ["basic", "sub_quad", "split", "pytorch", "xformers", "sage", "flash"])
def test_every_attention_is_right_in_the_rerun(ran: native.Ran, name: str) -> None:
    assert native.difference(ran[f"attention/{name}, guarded"], ran["attention/fp32"]) <= 1e-5
    fp16, fp32 = "torch.float16", "torch.float32"
    assert ran[f"attention/{name}, kernel"] == {"xformers": [fp16, fp32], "sage": [fp16], "flash": [fp16]}.get(name, [])


def test_another_packs_attention_gives_way_in_the_rerun(ran: native.Ran) -> None:
    assert ran["override/called"] == ["torch.float16"]
    assert torch.equal(ran["override/guarded"], ran["override/fp32"])


@pytest.mark.parametrize(
    ("run", "seen"),
    {
        "sm80, torch.float16, healthy": ["torch.float16: 0, False"] * 3,
        "sm80, torch.float16, hot": ["torch.float16: 0, False", "torch.float32: 0, False"],
        "sm70, torch.float16, healthy": ["torch.float16: 1, True"] * 3,
        "sm80, torch.bfloat16, healthy": ["torch.bfloat16: unset, True"] * 3,
    }.items(),
    ids=str,
)
def test_the_accumulation_switches_are_held_while_a_call_runs(ran: native.Ran, run: str, seen: list[str]) -> None:
    assert sorted(set(ran[f"accumulation/{run}, seen"])) == sorted(set(seen))
    assert ran[f"accumulation/{run}, restored"]
    said = ran[f"accumulation/{run}, said"]
    assert ("half-precision accumulation" in said) == ("float16, " in run and "bfloat16" not in run)
    assert len(ran[f"accumulation/{run}, seen"]) >= len(seen)


def test_the_accumulation_switches_are_put_back_after_an_error(ran: native.Ran) -> None:
    assert ran["accumulation/error"].startswith("ValueError: 0, ")  # the CPU's, which nobody reported
    assert ran["accumulation/restored"]


@pytest.mark.parametrize("layout", ["sd15", "svd", "flux"])
def test_a_fault_in_one_step_costs_one_step(ran: native.Ran, layout: str) -> None:
    guarded, fp32 = ran[f"a_fault_in_one_step/{layout}, guarded"], ran[f"a_fault_in_one_step/{layout}, fp32"]
    assert 0 < native.difference(guarded, fp32) <= 2e-2
    assert "3 steps, 1 rerun." in ran[f"a_fault_in_one_step/{layout}, said"]
