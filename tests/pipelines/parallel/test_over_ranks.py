"""A run over several processes gives the result of one process, in fp32, with any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.parallel.exchange import shares
from comfyui_onediff_guard.pipelines.parallel.split_calls import parallel_layout
from rank_runs import Case, Made, run_cases, run_in_ranks, sampled
from tiers import by_tier

TWO_CALLS = ("cogview4", "wan", "wan-ti2v", "wan-two")  # models that are called once for each half of guidance
# Stable Video Diffusion's sampler begins at 700 times the latents: in few steps what is rounded there stays
CASES = {  # description → (model, what differs from the default)
    "CogVideoX-2B": ("2b", {}),
    "CogVideoX-2B without guidance": ("2b", {"guidance": 1.0}),
    "CogVideoX-5B, with rotary positions": ("5b", {}),
    "CogVideoX-1.5, with patches in time": ("1.5", {}),
    "CogVideoX from an image": ("5b-i2v", {}),
    "CogView3-Plus": ("cogview3", {}),
    "CogView4": ("cogview4", {}),
    "CogView4 without guidance": ("cogview4", {"guidance": 1.0}),
    "Wan": ("wan", {}),
    "Wan without guidance": ("wan", {"guidance": 1.0}),
    "Wan 2.2, with a timestep for each token": ("wan-ti2v", {}),
    "Wan 2.2, with two transformers": ("wan-two", {}),
    "Stable Video Diffusion": ("svd", {"steps": 6, "chunk": 2}),
    "Stable Video Diffusion without guidance": ("svd", {"steps": 6, "guidance": 1.0}),
}
IN_CHUNKS = "Stable Video Diffusion"
GROUPS = (2, 3, 4)[:: by_tier(1, 2)]  # ranks. Of 4 heads, with 3 ranks, the first has one more
CLOSE = 1e-5  # of the largest value


@pytest.fixture(scope="module", params=GROUPS)
def found(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> tuple[int, dict[str, list[Made]]]:
    """The result of each rank in each case that the selected tests need, all in one group of processes."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    params = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    needed = {each.get("case", IN_CHUNKS) for each in params if each.get("found") == request.param}
    cases = {case: Case(model, model_folder(model), **more) for case, (model, more) in CASES.items() if case in needed}
    by_rank = run_in_ranks(request.param, run_cases, [*cases.values()])
    return request.param, {case: [each[number] for each in by_rank] for number, case in enumerate(cases)}


@pytest.fixture(scope="module")
def one_process(model_folder: Callable[..., Path]) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def made(case: str) -> Made:
        model, more = CASES[case]
        known[case] = known.get(case) or sampled(Case(model, model_folder(model), **more))
        return known[case]

    return made


@pytest.mark.parametrize(
    ("size", "guided", "splits", "said"),
    [
        (2, True, True, "each half of guidance is computed by a GPU, at the same time as the other"),
        (3, True, True, "each call is computed by 3 GPUs together"),
        (4, True, True, "each half of guidance is computed by 2 GPUs together, at the same time as the other"),
        (3, False, True, "each call is computed by 3 GPUs together"),
        (3, True, False, "each half of guidance is computed by a GPU, at the same time as the other; "
            "unused GPUs: 1"),
        (2, False, False, "each call is computed by a GPU; unused GPUs: 1"),
    ],
)  # fmt: skip
def test_parallel_layout_says_what_ranks_share(size: int, guided: bool, splits: bool, said: str) -> None:
    assert str(parallel_layout(size, guided=guided, splits=splits)) == said


@pytest.mark.parametrize("case", CASES)
def test_fp32_run_over_ranks_matches_one_process(
    case: str, found: tuple[int, dict[str, list[Made]]], one_process: Callable[[str], Made], figure: Callable[..., None]
) -> None:
    size, ran = found
    model, more = CASES[case]
    guided, splits, two_calls = "guidance" not in more, model != "svd", model in TWO_CALLS
    halves = guided and (size in (2, 4) or not splits)
    made, one = ran[case], one_process(case)
    steps = one.steps[::2] if halves and two_calls else one.steps  # both calls of a step are one then
    assert all(torch.equal(each.latents, made[0].latents) and each.steps == steps for each in made)
    distance = float((made[0].latents - one.latents).abs().max() / one.latents.abs().max())
    figure(f"{case}: {size} ranks against one process in fp32, of the largest value", f"{distance:.1e}")
    assert distance <= CLOSE
    context = (size // 2 if halves else size) if splits else 1
    assert [each.tokens for each in made] == shares(one.tokens, context) * (size // context)
    assert {each.batch for each in made} == {one.batch // 2 if halves and not two_calls else one.batch}
    assert str(parallel_layout(size, guided=guided, splits=splits)) in made[0].notes


def test_chunks_are_decoded_by_all_ranks(
    found: tuple[int, dict[str, list[Made]]], one_process: Callable[[str], Made], figure: Callable[..., None]
) -> None:
    """Each rank decodes one or two of three chunks. A rank without one repeats the last."""
    size, ran = found
    case = IN_CHUNKS
    made, one = ran[case], one_process(case)
    assert one.frames is not None and len(one.decoding) == 3
    frames = made[0].frames
    assert frames is not None
    assert all(each.frames is not None and torch.equal(each.frames, frames) for each in made)
    distance = float((frames - one.frames).abs().max())
    figure(f"{case}, decoded in chunks: {size} ranks against one process in fp32, of white", f"{distance:.1e}")
    assert distance <= CLOSE
    assert [len(each.decoding) for each in made] == [2 if size == 2 else 1] * size
    assert f"chunks are decoded by {size} GPUs at the same time" in made[0].notes
