"""A call that ranks share, in one process: which copy of the denoiser is called, and its memory estimate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.compiled_blocks import CompiledRun
from comfyui_onediff_guard.pipelines.parallel.group import ProcessGroup
from comfyui_onediff_guard.pipelines.parallel.split_calls import ParallelRun
from comfyui_onediff_guard.pipelines.run.denoiser import build_attempt
from comfyui_onediff_guard.pipelines.run.feature import DenoiserSetup, RunContext, joined, split_cfg_batch
from comfyui_onediff_guard.pipelines.weights.activation_memory import estimate_activation_bytes
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.policy import PlanImpossible
from diffusers import CogVideoXTransformer3DModel
from small_runs import opened


def shared(handle: Any, *, guided: bool) -> Any:
    """The stage of a run's denoiser."""
    stage = handle.denoising()[0]
    return ParallelRun(RunContext(handle, stage.plan, stage.report, guided=guided)).prepare(stage)


def split_of(module: Any) -> tuple[int, ...]:
    """The number of ranks for each split of its tokens."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if hook.__module__.endswith("shallow_copy")]
    closures = [cell.cell_contents for hook in hooks for cell in hook.__closure__]
    counts = [each for each in closures if getattr(each, "__name__", "") == "count_tokens"]
    splits = [cell.cell_contents for each in counts for cell in each.__closure__]
    return tuple(each.size for each in splits if isinstance(each, ProcessGroup))


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_halves_of_guidance_give_whole_call(tokens: int) -> None:
    """A rotary table has a row for each token and no batch, even where both are as long."""
    sizes = {"max_text_seq_length": 3, "sample_height": 2, "sample_width": 2 * tokens, "sample_frames": 1}
    options = {"use_rotary_positional_embeddings": True, "text_embed_dim": 8, "num_layers": 1, "time_embed_dim": 8}
    torch.manual_seed(0)
    module = CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=16, **sizes, **options)
    angles = torch.linspace(0, 3, tokens * 16).reshape(tokens, 16)
    call = {"hidden_states": torch.randn(2, 1, 16, 2, 2 * tokens), "encoder_hidden_states": torch.randn(2, 3, 8)}
    call |= {"timestep": torch.tensor([700, 700]), "image_rotary_emb": (angles.cos(), angles.sin())}
    with torch.no_grad():
        whole, parts = module(**call)[0], [module(**part) for part in split_cfg_batch(call)]
    assert torch.allclose(joined(parts)[0], whole, atol=1e-5)


@pytest.mark.parametrize("order", [(False, True), (True, False), (False, False, True, True)])
@pytest.mark.parametrize("size", [2, 4])
def test_run_does_not_reuse_copy_from_run_with_other_sharing(
    monkeypatch: pytest.MonkeyPatch, order: tuple[bool, ...], size: int
) -> None:
    monkeypatch.setattr(backends, "_compile", lambda block, *_: block)  # only which copy is called matters here
    monkeypatch.setattr(ProcessGroup, "part", lambda ranks, size: ProcessGroup(ranks.rank % size, size))
    handle = opened("2b", "none", "bf16", backend="inductor", ranks=ProcessGroup(0, size))
    for guided in order:
        stage = shared(handle, guided=guided)
        run = CompiledRun(RunContext(handle, stage.plan, stage.report, guided=guided))
        made = build_attempt(stage, [run.of_calls(DenoiserSetup(stage, {}))], NOTHING)
        by = size // 2 if guided else size
        assert split_of(made.run) == split_of(stage.module) == ((by,) if by > 1 else ())


def test_memory_estimate_falls_with_number_of_ranks() -> None:
    estimates: list[int] = []
    for ranks in (1, 2, 4):
        handle = opened("2b", "none", "bf16", ranks=ProcessGroup(0, ranks))
        stage = shared(handle, guided=False)
        inputs = handle.family.step_inputs(handle.store.model.denoiser_config, (1, 16, 3, 8, 12), {})
        estimates.append(estimate_activation_bytes(DenoiserSetup(stage, inputs | {"return_dict": False})))
        assert not [note for note in stage.report.notes if "could not be estimated" in note]
    assert estimates[0] > estimates[1] > estimates[2] > 0


def test_attention_backend_is_refused_where_ranks_share_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "flash")
    handle = opened("2b", "none", "bf16", ranks=ProcessGroup(0, 2))
    assert shared(handle, guided=True).shared_by == 1
    with pytest.raises(PlanImpossible, match=r"DIFFUSERS_ATTN_BACKEND is flash\. Unset it"):
        shared(handle, guided=False)
