"""Memory runs out on the card: the run falls back to a cheaper mode, or ends and names what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from card_room import CUDA, Room, fallbacks, offload_all, result_and_peak
from comfyui_onediff_guard.pipelines.run import denoiser
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights import activation_memory as rooms
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.placement import NoRoom, bytes_on, ran_out
from comfyui_onediff_guard.precision.kernels import Kernels
from comfyui_onediff_guard.precision.memory import size
from comfyui_onediff_guard.precision.policy import Component
from small_runs import SIZES, sampled

MODELS = [pytest.param(name, marks=[pytest.mark.long] if name == "svd" else []) for name in SIZES]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_estimated_memory_matches_what_a_stage_uses(room: Room, model: str, precision: str) -> None:
    """The estimate from meta tensors against the bytes that the run used."""
    handle = room.opened(model, precision=precision)
    latents, _ = sampled(handle, model)
    decode(handle, latents)  # loads the weights
    _, decoding = room.measure(lambda: decode(handle, latents))
    for stage, most in (("denoiser", room.call_bytes["denoiser"]), ("vae_decode", decoding)):
        asked = [found for key, (found, _) in handle.store.room.items() if key[1].component.value == stage]
        assert asked[0] in room.requested
        assert asked[0] / most == pytest.approx(1, abs=0.12), stage
    assert len(handle.store.room) == 2 + handle.family.takes_image + bool(handle.family.prompt), "one estimate each"


NO_KERNELS = Kernels(
    attention=lambda query, *_, **__: f"no fused attention in {query.dtype}.",
    conv3d=lambda dtype: "no cuDNN for 3D convolutions." if dtype is torch.bfloat16 else "",
)


@pytest.mark.long
def test_memory_for_missing_kernels_is_requested_and_noted_once(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = room.opened("2b", precision="bf16")
    decode(lean, sampled(lean, "2b")[0])
    asked = [*room.requested]
    monkeypatch.setattr(rooms, "kernels_of", {lean.store.placement.device: NO_KERNELS}.__getitem__)
    handle, attention = room.opened("2b", precision="bf16"), "no fused attention in torch.bfloat16."
    for _ in range(2):
        latents, report = sampled(handle, "2b")
        _, decoded = decode(handle, latents)
        for said, why in ((report, attention), (decoded, "no cuDNN for 3D convolutions.")):
            (note,) = [note for note in said.notes if " of activations: " in note]
            stage = said.plan.component
            (takes,) = [most for key, (most, _) in handle.store.room.items() if key[1].component is stage]
            (needs,) = [most for key, (most, _) in lean.store.room.items() if key[1].component is stage]
            assert takes > 1.1 * needs and takes in room.requested and needs in asked
            assert note == f"{stage.words} takes {size(takes)} of activations: {why}"


def weights_of(handle: PipelineHandle, name: str, dtype: str = "fp32") -> int:
    module = handle.store.module(name, dtype, place=False)
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def in_parts(handle: PipelineHandle, offload: Offload) -> int:
    """Bytes of the denoiser's weights on the card at one time."""
    most = replace(handle, offload=offload).stage(Component.DENOISER).weights.most_bytes
    offload_all(handle)
    handle.store.components[handle.family.denoiser].forget_parts()
    return most


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["CFG halves in turn", "group", "sequential"])
def test_run_with_less_memory_falls_back_to_a_cheaper_mode(room: Room, model: str, way: str) -> None:
    """The limit is what the denoiser used, minus most of what this mode saves."""
    handle = room.opened(model)
    right, _ = sampled(handle, model)
    even = handle.family.guidance.calls == 1
    weights = weights_of(handle, handle.family.denoiser)
    saved = room.call_bytes["denoiser"] / 5 if even else 0
    if way != "CFG halves in turn":
        saved += 0.9 * (weights - in_parts(handle, Offload(way)))
    limit = weights + room.bytes_beside_weights["denoiser"] - saved
    with room.limited(limit, only="denoiser"):
        latents, report = sampled(handle, model)
    offloads = (
        [f"{each}, CFG halves in turn" for each in ("none", "group", "sequential")] if even else ["group", "sequential"]
    )
    taken, order = fallbacks(report), ["nothing else on the device", *offloads]
    assert taken == order[: len(taken)]
    if saved > limit / 50:  # a small Wan has only two blocks
        assert len(taken) > 1
    assert len(report.steps) == 2 * report.calls_per_step, "a repeated step counts once"
    assert (latents - right).norm() <= 1e-4 * right.norm()
    again, report = sampled(handle, model)
    assert torch.equal(again, right) and not fallbacks(report)


@pytest.mark.quick
def test_other_components_are_evicted_before_any_fallback(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = room.opened("5b-i2v")
    right, _ = sampled(handle, "5b-i2v")  # the VAE stays on the card
    monkeypatch.setattr(denoiser, "estimate_activation_bytes", lambda *_: room.call_bytes["denoiser"])
    limit = weights_of(handle, "transformer") + room.bytes_beside_weights["denoiser"]
    with room.limited(limit, only="denoiser"):
        latents, report = sampled(handle, "5b-i2v")
        assert not bytes_on(CUDA, handle.store.module("vae", "fp32", place=False))
    assert not fallbacks(report), "before memory runs out"
    assert torch.equal(latents, right)


@pytest.mark.parametrize("model", MODELS)
def test_run_without_memory_names_its_needs_and_leaves_no_state(room: Room, model: str) -> None:
    handle = room.opened(model)
    right, _ = sampled(handle, model)
    with room.limited(1000, only="denoiser"), pytest.raises(NoRoom) as failed:
        sampled(handle, model)
    text = str(failed.value)
    assert text.startswith("denoiser: out of memory, all fallbacks failed.")
    assert "Tried: nothing else on the device; " in text and "; sequential" in text
    assert "cuda:0 has 0.001 MB, " in text and "A call needs " in text and " of weights and " in text
    assert "smaller size, fewer frames" in text
    assert isinstance(failed.value, torch.OutOfMemoryError), "so ComfyUI unloads its models too"
    assert not bytes_on(CUDA, handle.store.module(handle.family.denoiser, "fp32", place=False))
    assert torch.equal(sampled(handle, model)[0], right)


@pytest.mark.parametrize("stage", ["text_encoder", "vae_encode", "vae_decode"])
def test_each_stage_without_memory_is_named_in_the_error(room: Room, stage: str) -> None:
    handle = room.opened("5b-i2v")
    with room.limited(1000, only=stage), pytest.raises(NoRoom, match=stage.replace("_", " ")):
        decode(handle, sampled(handle, "5b-i2v")[0])
    decode(handle, sampled(handle, "5b-i2v")[0])


@pytest.mark.quick
def test_text_encoder_falls_back_to_group_offload(room: Room) -> None:
    handle = room.opened("2b")
    right, _ = encode_prompts(handle, ["a red kite"])
    made = room.call_bytes["text_encoder"]
    handle.store.prompts.clear()
    with room.limited(made + 0.8 * weights_of(handle, "text_encoder"), only="text_encoder"):
        embeddings, report = encode_prompts(handle, ["a red kite"])
    assert fallbacks(report)[:2] == ["nothing else on the device", "group"]
    assert torch.equal(embeddings[0], right[0])


@pytest.mark.parametrize(
    ("model", "how"),
    [("2b", "tiling"), ("cogview3", "tiling"), pytest.param("svd", "2 at once", marks=pytest.mark.long)],
)
def test_decoding_with_less_memory_falls_back_to_smaller_parts(room: Room, model: str, how: str) -> None:
    handle = room.opened(model)
    latents, _ = sampled(handle, model)
    (right, _), most = result_and_peak(room, handle, lambda: decode(handle, latents))
    with room.limited(most - 1, only="vae_decode"):
        frames, report = decode(handle, latents)
    assert fallbacks(report) == ["nothing else on the device", how]
    assert frames.shape == right.shape and (frames - right).abs().mean() < 0.2  # tiles of a small VAE differ
    assert torch.equal(decode(handle, latents)[0], right)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)\nUse ..."), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("shapes do not match\nnot out of memory"), False),
        (RuntimeError(), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: RuntimeError, is_one: bool) -> None:
    assert ran_out(error) is is_one


@pytest.mark.quick
def test_other_errors_are_not_retried(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = room.opened("2b")
    embed = handle.store.module("transformer", "fp32", place=False).patch_embed
    forward, called = embed.forward, []

    def broken(text: torch.Tensor, *given: Any) -> Any:
        if text.is_meta:  # during the estimate
            return forward(text, *given)
        called.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(embed, "forward", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampled(handle, "2b")
    assert len(called) == 1


@pytest.mark.quick
def test_fp32_rerun_uses_the_same_fallback(room: Room) -> None:
    """There is memory for a step in half precision, but not for the same step in float32."""
    handle = room.opened("2b", precision="bf16")
    right, _ = sampled(handle, "2b")
    block = handle.store.module("transformer", "bf16", place=False).transformer_blocks[1]

    def overflows(_block: Any, _given: Any, made: Any) -> Any:
        return tuple(part * float("nan") if part.dtype == torch.bfloat16 else part for part in made)

    hook = block.register_forward_hook(overflows)
    limit = weights_of(handle, "transformer", "bf16") + 1.05 * room.call_bytes["denoiser"]
    with room.limited(limit, only="denoiser"):
        latents, report = sampled(handle, "2b")
    hook.remove()
    assert report.reruns >= 1 and latents.isfinite().all()
    assert fallbacks(report)[:2] == ["nothing else on the device", "none, CFG halves in turn"]
    assert (latents - right).norm() <= 0.05 * right.norm()
