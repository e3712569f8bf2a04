"""A run over several processes comes to what one process comes to, in every precision, with any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.parallel.exchange import shares
from rank_runs import Case, Made, choosing_kernels, in_ranks, run_cases, sampled
from tiers import drawn

CASES = {  # in words → model, overflow, and what differs from the default
    "CogVideoX-2B": ("2b", "none", {}),
    "CogVideoX-5B, with rotary positions": ("5b", "none", {}),
    "CogVideoX-1.5, with patches in time": ("1.5", "none", {}),
    "CogVideoX, with a step cache": ("2b", "none", {"cache": True}),
    "CogVideoX from an image": ("5b-i2v", "none", {}),
    "CogView3-Plus": ("cogview3", "none", {}),
    "CogView4": ("cogview4", "none", {}),
    "Wan": ("wan", "none", {}),
    "Wan 2.2, with a timestep for each token": ("wan-ti2v", "none", {}),
    "Wan 2.2, with two transformers": ("wan-two", "none", {}),
}
GROUPS = (2, 3, 4)[:: drawn(1, 2)]  # ranks. Of 4 heads, with 3 ranks, the first has one more
CLOSE = 1e-5  # of the largest value


@pytest.fixture(scope="module", params=GROUPS)
def found(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> tuple[int, list[list[Made]]]:
    """What each rank made of each case, all in one group of processes."""
    cases = [Case(model, model_folder(model, overflow), **more) for model, overflow, more in CASES.values()]
    return request.param, in_ranks(request.param, run_cases, cases)


@pytest.fixture(scope="module")
def alone(model_folder: Callable[..., Path]) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def made(words: str) -> Made:
        model, overflow, more = CASES[words]
        known[words] = known.get(words) or sampled(Case(model, model_folder(model, overflow), **more))
        return known[words]

    return made


@pytest.mark.parametrize("words", CASES)
def test_in_fp32_it_is_what_one_process_makes(
    words: str, found: tuple[int, list[list[Made]]], alone: Callable[[str], Made], figure: Callable[..., None]
) -> None:
    size, by_rank = found
    made, one = [each[[*CASES].index(words)] for each in by_rank], alone(words)
    assert all(torch.equal(each.latents, made[0].latents) and each.steps == one.steps for each in made)
    away = float((made[0].latents - one.latents).abs().max() / one.latents.abs().max())
    figure(f"{words}: {size} ranks against one process in fp32, of the largest value", f"{away:.1e}")
    assert away <= CLOSE
    assert [each.tokens for each in made] == shares(one.tokens, size)
    assert f"each call is computed by {size} GPUs together" in made[0].notes
    uncached = any(note.startswith("no step is cached over several GPUs") for note in made[0].notes)
    assert uncached == ("step cache" in words)


def test_the_first_rank_chooses_the_attention_kernel_at_its_share_of_the_heads(
    model_folder: Callable[..., Path],
) -> None:
    (first, asked), (second, unasked) = in_ranks(2, choosing_kernels, Case("2b", model_folder("2b")))
    assert "attention: math, measured 2.00 times as fast" in first.backend == second.backend
    assert torch.equal(first.latents, second.latents)
    assert not unasked and [call.query[1] for call in asked] == [2], "of four heads"
    (call,) = asked
    assert call.query[-2] == call.key[-2] > first.tokens + second.tokens, "all tokens of the picture, and the text's"
