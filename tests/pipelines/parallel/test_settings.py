"""Settings of runs over ranks: half precision, LoRAs, block offload and a step cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_runs import Case, Made, run_cases, run_in_ranks, sampled
from small_runs import error
from trained_lora import train_lora

SIZE = 2
MODELS = ("5b", "cogview3", "cogview4", "wan", "svd")
WITH_LORA = ("5b", "cogview4", "wan")
PRECISIONS = ("bf16", "fp16")  # in fp16, all but Stable Video Diffusion have a stream in float32
OFFLOADS = ("group", "sequential")
SMALL = {"svd": (64, 64, 3)}
CACHED = 12  # steps


def case(model: str, folder: Path, **more: object) -> Case:
    return replace(Case(model, folder, size=SMALL.get(model)), **more)


@pytest.fixture(scope="module")
def cases(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Description → run. With guidance, each of two ranks computes a half. Without it, they share the tokens."""
    found: dict[str, Case] = {}
    for model in MODELS:
        folder = model_folder(model)
        for precision in ("fp32", *PRECISIONS):
            found[f"{model} in {precision}"] = case(model, folder, precision=precision)
        for offload in OFFLOADS:
            found[f"{model} with offload {offload}"] = case(model, folder, offload=offload)
        found[f"{model} with a step cache"] = case(model, folder, cache=True, steps=CACHED)
        if model in WITH_LORA:
            lora = train_lora(tmp_path_factory.mktemp(model), folder, layers=("to_q", "to_out.0"))
            found[f"{model} with a LoRA"] = case(model, folder, lora=lora.path)
    without = [name for name in found if name.startswith(("5b", "wan"))]
    return found | {f"{name}, without guidance": replace(found[name], guidance=1.0) for name in without}


@pytest.fixture(scope="module")
def found(cases: dict[str, Case]) -> dict[str, list[Made]]:
    by_rank = run_in_ranks(SIZE, run_cases, [*cases.values()])
    return {name: [each[number] for each in by_rank] for number, name in enumerate(cases)}


def agreed(name: str, found: dict[str, list[Made]]) -> Made:
    """The result of one rank, after a check that all ranks agree."""
    made = found[name]
    assert all(torch.equal(each.latents, made[0].latents) and each.steps == made[0].steps for each in made)
    assert torch.isfinite(made[0].latents).all()
    return made[0]


GUIDED = (*((model, "") for model in MODELS), *((model, ", without guidance") for model in ("5b", "wan")))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("model", "suffix"), GUIDED)
def test_half_precision_over_ranks_is_as_near_to_fp32_as_one_process(
    model: str, suffix: str, precision: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    made, settings = agreed(f"{model} in {precision}{suffix}", found), cases[f"{model} in {precision}{suffix}"]
    exact, one = sampled(replace(settings, precision="fp32")).latents, sampled(settings)
    assert {dtype for dtype, _, _ in made.steps} == {dtype for dtype, _, _ in one.steps} == {precision}
    assert 0 < error(made.latents, exact) <= 2 * error(one.latents, exact)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(("model", "suffix"), GUIDED)
def test_block_offload_over_ranks_is_bit_equal_to_no_offload(
    model: str, suffix: str, offload: str, found: dict[str, list[Made]]
) -> None:
    whole = agreed(f"{model} in fp32{suffix}", found)
    assert torch.equal(agreed(f"{model} with offload {offload}{suffix}", found).latents, whole.latents)


@pytest.mark.parametrize(("model", "suffix"), [(model, suffix) for model, suffix in GUIDED if model in WITH_LORA])
def test_lora_over_ranks_matches_one_process(
    model: str, suffix: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    settings = cases[f"{model} with a LoRA{suffix}"]
    one, without = sampled(settings).latents, sampled(replace(settings, lora=None)).latents
    distance = (agreed(f"{model} with a LoRA{suffix}", found).latents - one).abs().max()
    assert distance <= 1e-5 * one.abs().max() < 1e3 * (one - without).abs().max()


@pytest.mark.parametrize(("model", "suffix"), [each for each in GUIDED if each[0] != "svd"])  # SVD has no step cache
def test_all_ranks_cache_the_same_steps(
    model: str, suffix: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    name = f"{model} with a step cache{suffix}"
    made, settings = agreed(name, found), cases[name]
    assert all(each.cached == made.cached for each in found[name]) and sum(made.cached) >= 2
    assert 0 < error(made.latents, sampled(replace(settings, cache=False)).latents) <= 0.5  # the target error
