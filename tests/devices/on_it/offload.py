"""Offload in parts: results are bit-equal to a run with all weights on the card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from card_room import Room
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import add_lora
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.placement import bytes_on, tensors_of
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from onediff.infer_compiler.backends import registry
from safetensors.torch import save_file
from small_runs import CUDA, opened, opened_fresh, sampled
from torch._dynamo.utils import counters

IN_PARTS = ["group", "sequential"]
Change = Callable[[Any], Any]


def same_run(offload: str, change: Change = lambda handle: handle, **how: Any) -> Any:
    """Check that a CogVideoX run has the latents of offload `none` and leaves the card empty; return its report.

    change: returns the handle to run."""
    made = {}
    for kind in ("none", offload):
        handle = opened_fresh("2b", kind, **how)
        made[kind] = sampled(change(handle), "2b", steps=3)
        denoiser = handle.store.components["transformer"]
        assert bool(bytes_on(CUDA, denoiser.adapted or denoiser.module)) == (kind == "none")
    (right, expected), (latents, report) = made.values()
    assert right.isfinite().all() and torch.equal(latents, right)
    outcomes = [[(step.dtype, step.outcome) for step in each.steps] for each in (report, expected)]
    assert outcomes[0] == outcomes[1]
    assert report.learned == expected.learned
    return report


def learning(handle: Any) -> Any:
    """Let hidden activations of one feed-forward reach 1e5 and more; its output stays the same."""
    denoiser = handle.store.module("transformer", "fp16", offload=handle.offload, place=False)
    with torch.no_grad():
        feed_forward = denoiser.transformer_blocks[1].ff
        feed_forward.net[0].proj.weight.mul_(2.0**17)
        feed_forward.net[2].weight.mul_(2.0**-17)
    return replace(handle, policy=GuardPolicy(scope=Scope.LEARNED))


@pytest.mark.parametrize(("offload", "backend"), [("group", "eager"), ("group", "inductor"), ("sequential", "eager")])
def test_learned_scales_match_offload_none(monkeypatch: pytest.MonkeyPatch, offload: str, backend: str) -> None:
    if backend == "inductor":  # it has no compiler for the card: the traced graph runs eagerly
        backends._register_inductor()
        monkeypatch.setitem(backends._PROBES, "inductor", lambda _device: "")
        compile_block = lambda module, *, options: torch.compile(module, backend="eager", **options)  # noqa: E731
        monkeypatch.setitem(registry._BACKENDS, "inductor", compile_block)
    before = counters["stats"]["unique_graphs"]
    report = same_run(offload, learning, precision="fp16", backend=backend)
    assert report.protection and not report.reruns
    graphs = counters["stats"]["unique_graphs"] - before
    assert graphs == (backend == "inductor"), "all blocks of both runs share one graph, although weights move"


@pytest.mark.parametrize("offload", IN_PARTS)
def test_attention_kernel_choice_matches_offload_none(offload: str) -> None:
    how = CompileOptions(attention="math")
    assert "attention: math" in same_run(offload, lambda handle: replace(handle, compile_options=how)).backend_reason


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Lora:
    """Low-rank pairs, and differences of biases, norms and a convolution."""
    torch.manual_seed(0)
    denoiser: Any = opened("2b", "none").store.module("transformer", "fp32", place=False)
    tensors, transformer = {}, "transformer"
    for block in range(len(denoiser.transformer_blocks)):
        for name in ("attn1.to_q", "attn1.to_out.0", "ff.net.2"):
            path = f"{transformer}.transformer_blocks.{block}.{name}"
            outputs, inputs = denoiser.get_submodule(path.removeprefix("transformer.")).weight.shape
            tensors |= {f"{path}.lora_A.weight": torch.randn(2, inputs), f"{path}.diff_b": torch.randn(outputs) / 8}
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 2) / 8
    for name in ("transformer_blocks.0.norm1.norm", "norm_final", "patch_embed.proj"):
        tensors[f"{transformer}.{name}.diff"] = torch.randn_like(denoiser.get_parameter(f"{name}.weight")) / 8
    file = tmp_path_factory.mktemp("lora") / "kite.safetensors"
    save_file(tensors, file)
    return Lora(file)


@pytest.mark.parametrize(("offload", "precision"), [("group", "fp16"), ("sequential", "bf16")])
def test_loras_match_offload_none(lora: Lora, offload: str, precision: str) -> None:
    how = {"precision": precision, "overflow": "stream"}
    report = same_run(offload, lambda handle: add_lora(handle, lora), **how)
    assert bool(report.protection) == (precision == "fp16") and not report.reruns


@pytest.mark.parametrize("offload", IN_PARTS)
def test_skipped_block_is_not_copied_to_the_device(card: Any, offload: str) -> None:
    """With `group`, the first block is already being copied: a model of two blocks saves nothing."""

    def cached(policy: CachePolicy | None, offload: str) -> tuple[torch.Tensor, Any, int]:
        handle = replace(opened_fresh("2b", offload), step_cache=policy)
        encode_prompts(handle, ["a red kite", "grey"])
        card.reset()
        latents, report = sampled(handle, "2b", steps=12)
        return latents, report.cache, card.counts()["bytes to the device"]

    wide = CachePolicy(error=0.5, check_every=3)  # random weights change more between steps than trained ones
    (right, usual, _), (latents, found, brought) = cached(wide, "none"), cached(wide, offload)
    assert found == usual and found.cached and torch.equal(latents, right)
    assert offload == "group" or brought < 0.95 * cached(CachePolicy(0.0), offload)[2]


def test_one_store_works_with_changing_offload_modes() -> None:
    """Handles of one store: each offload mode finds the weights where the last one left them."""
    first = opened("2b", "none")
    right, _ = sampled(first, "2b")
    for kind in ("group", "none", "sequential", "model", "group", "none"):
        handle = replace(first, offload=Offload(kind))
        assert torch.equal(sampled(handle, "2b")[0], right)
        assert bool(handle.store.components["transformer"].offloaded) == handle.offload.in_parts, kind


def test_memory_is_requested_only_for_the_loaded_parts(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, asked = room.opened("2b", "sequential"), []
    monkeypatch.setattr(handle.store.placement, "make_room", asked.append)
    _, report = sampled(handle, "2b")
    weights = handle.store.components["transformer"].offloaded
    assert weights
    total = sum(tensor.nbytes for tensor in tensors_of(weights.made_for[0]))
    assert asked.count(weights.most_bytes) == 1 and total not in asked
    assert report.memory.weights == weights.most_bytes < total


@pytest.mark.parametrize("offload", ["model", *IN_PARTS])
def test_scaled_text_encoder_is_bit_equal_to_offload_none(offload: str) -> None:
    def encoded(offload: str) -> Any:
        handle = opened_fresh("2b", offload, "fp16")
        encoder: Any = handle.store.module("text_encoder", "fp16", place=False)
        with torch.no_grad():  # its first attention overflows fp16, where T5 clamps to ±64504
            weight = encoder.encoder.block[0].layer[0].SelfAttention.o.weight
            weight.div_(weight.abs().max()).mul_(6e4)
        return encode_prompts(handle, ["a red kite"])

    (right, _), (found, report) = encoded("none"), encoded(offload)
    assert report.protection == "overflow protection" and report.reruns == 0
    assert torch.equal(found[0], right[0])


@pytest.mark.parametrize("offload", IN_PARTS)
def test_only_one_component_is_loaded_in_parts_at_a_time(monkeypatch: pytest.MonkeyPatch, offload: str) -> None:
    handle, asked = opened("2b", offload), []

    def in_parts() -> list[str]:
        return [name for name, component in handle.store.components.items() if component.offloaded]

    monkeypatch.setattr(handle.store.placement, "make_room", lambda _: asked.append(in_parts()))
    sampled(handle, "2b")
    assert asked[0] == ["text_encoder"] and in_parts() == ["transformer"]


@pytest.mark.parametrize(("model", "encoders"), [("5b-i2v", ["vae"]), ("svd", ["image_encoder", "vae"])])
def test_image_encoders_are_offloaded_while_the_denoiser_runs(model: str, encoders: list[str]) -> None:
    handle, on_card = opened(model, "group"), []

    def look(*_: object) -> None:
        on_card.extend(bytes_on(CUDA, handle.store.module(name, "fp32", place=False)) for name in encoders)

    sampled(handle, model, step_done=look)
    assert on_card and not any(on_card)


@pytest.mark.parametrize(("offload", "times"), [("none", 0), ("group", 1)])
def test_page_locked_memory_is_freed_with_its_component(
    monkeypatch: pytest.MonkeyPatch, offload: str, times: int
) -> None:
    released = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: released.append(True), raising=False)
    encode_prompts(opened("2b", offload), ["a red kite"])
    assert len(released) == times
