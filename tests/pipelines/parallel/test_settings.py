"""What a run can be set to, it can be set to over ranks: half precision, LoRAs, an offload in parts, a step cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_runs import Case, Made, in_ranks, run_cases, sampled
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
    """In words → a run. Guided, each of two ranks computes a half; without guidance they share the tokens."""
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
    without = [words for words in found if words.startswith(("5b", "wan"))]
    return found | {f"{words}, without guidance": replace(found[words], guidance=1.0) for words in without}


@pytest.fixture(scope="module")
def found(cases: dict[str, Case]) -> dict[str, list[Made]]:
    by_rank = in_ranks(SIZE, run_cases, [*cases.values()])
    return {words: [each[number] for each in by_rank] for number, words in enumerate(cases)}


def of_one(words: str, found: dict[str, list[Made]]) -> Made:
    """What a rank made, after all were seen to have made the same."""
    made = found[words]
    assert all(torch.equal(each.latents, made[0].latents) and each.steps == made[0].steps for each in made)
    assert torch.isfinite(made[0].latents).all()
    return made[0]


GUIDED = (*((model, "") for model in MODELS), *((model, ", without guidance") for model in ("5b", "wan")))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("model", "how"), GUIDED)
def test_half_precision_is_as_near_as_one_process_is(
    model: str, how: str, precision: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    made, asked = of_one(f"{model} in {precision}{how}", found), cases[f"{model} in {precision}{how}"]
    exact, one = sampled(replace(asked, precision="fp32")).latents, sampled(asked)
    assert {dtype for dtype, _, _ in made.steps} == {dtype for dtype, _, _ in one.steps} == {precision}
    assert 0 < error(made.latents, exact) <= 2 * error(one.latents, exact)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(("model", "how"), GUIDED)
def test_weights_that_come_in_parts_make_the_same_bits(
    model: str, how: str, offload: str, found: dict[str, list[Made]]
) -> None:
    whole = of_one(f"{model} in fp32{how}", found)
    assert torch.equal(of_one(f"{model} with offload {offload}{how}", found).latents, whole.latents)


@pytest.mark.parametrize(("model", "how"), [(model, how) for model, how in GUIDED if model in WITH_LORA])
def test_a_lora_is_added_on_every_rank(
    model: str, how: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    asked = cases[f"{model} with a LoRA{how}"]
    one, without = sampled(asked).latents, sampled(replace(asked, lora=None)).latents
    away = (of_one(f"{model} with a LoRA{how}", found).latents - one).abs().max()
    assert away <= 1e-5 * one.abs().max() < 1e3 * (one - without).abs().max()


@pytest.mark.parametrize(("model", "how"), [each for each in GUIDED if each[0] != "svd"])  # which has no step cache
def test_all_ranks_cache_the_same_steps(
    model: str, how: str, cases: dict[str, Case], found: dict[str, list[Made]]
) -> None:
    words = f"{model} with a step cache{how}"
    made, asked = of_one(words, found), cases[words]
    assert all(each.cached == made.cached for each in found[words]) and sum(made.cached) >= 2
    assert 0 < error(made.latents, sampled(replace(asked, cache=False)).latents) <= 0.5  # the target error
