"""Memory runs out on a card that has so many bytes: the run goes on in a cheaper way, or ends with what it needs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import room
from comfyui_onediff_guard.pipelines.weights.ladder import NoRoom, ran_out
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision import wide
from comfyui_onediff_guard.precision.kernels import Kernels
from comfyui_onediff_guard.precision.peaks import size
from comfyui_onediff_guard.precision.policy import Component, Precision
from limited import CardPlacement, Computing, LimitedCard, limited_card
from small_runs import SIZES, sampled

MODELS = [*SIZES]
LOADED: dict[str, Any] = {"precision": Precision("fp32"), "backend": "eager", "offload": "none"}


@pytest.fixture
def card() -> Generator[LimitedCard]:
    with limited_card() as card:
        yield card


def opened(card: LimitedCard, folder: Path, offload: str = "none", precision: str = "fp32") -> PipelineHandle:
    stores._STORES.clear()
    options: dict[str, Any] = {"backend": "eager", "offload": offload, "placement": CardPlacement(card)}
    return load(folder, family_of(folder), precision=Precision(precision), **options)


def everything_away(handle: PipelineHandle) -> None:
    for name in handle.store.loaded():
        handle.store.rest(name)


def most_of(card: LimitedCard, handle: PipelineHandle, run: Callable[[], Any]) -> tuple[Any, int]:
    """What a run gave, and the most bytes that it held, where there is room for all."""
    everything_away(handle)
    with card.limited(float("inf")):
        made = run()
        most = card.most
    everything_away(handle)
    return made, most


def as_on_a_gpu(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In one pass; a CPU is given more memory in place of time."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_asked_for_is_what_a_stage_takes(
    card: LimitedCard,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    precision: str,
) -> None:
    """The count on tensors without values, against the bytes that the run held."""
    monkeypatch.setattr(wide, "times", as_on_a_gpu)
    handle = opened(card, model_folder(model), precision=precision)
    latents, _ = sampled(handle, model)
    decode(handle, latents)  # which loads
    with Computing(card) as decoding:
        decode(handle, latents)
    held = {"denoiser": card.made["denoiser"], "vae_decode": decoding.most}
    for stage, most in held.items():
        asked = [room for key, room in handle.store.room.items() if key[1].component.value == stage]
        assert asked[0] in handle.store.placement.asked
        assert asked[0] / most == pytest.approx(1, abs=0.12), stage
    assert len(handle.store.room) == 2 + handle.family.takes_image + bool(handle.family.prompt), "each is counted once"


def test_nothing_is_counted_where_memory_is_main_memory(model_folder: Callable[..., Path]) -> None:
    handle = load(model_folder("2b"), family_of(model_folder("2b")), **LOADED, placement=PlainPlacement())
    latents, _ = sampled(handle, "2b")
    decode(handle, latents)
    assert handle.store.room == {}


NO_KERNELS = Kernels(
    attention=lambda query, *_, **__: f"no fused attention in {query.dtype}.",
    conv3d=lambda dtype: "no cuDNN for 3D convolutions." if dtype is torch.bfloat16 else "",
)


def test_what_takes_more_for_want_of_a_kernel_is_asked_for_and_said_once_in_each_run(
    card: LimitedCard, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = opened(card, model_folder("2b"), precision="bf16")
    decode(lean, sampled(lean, "2b")[0])
    asked = lean.store.placement.asked
    monkeypatch.setattr(room, "kernels_of", {lean.store.placement.device: NO_KERNELS}.__getitem__)
    handle = opened(card, model_folder("2b"), precision="bf16")
    for _ in range(2):
        latents, report = sampled(handle, "2b")
        _, decoded = decode(handle, latents)
        for said, why in (
            (report, "no fused attention in torch.bfloat16."),
            (decoded, "no cuDNN for 3D convolutions."),
        ):
            (note,) = [note for note in said.notes if "beside its weights" in note]
            stage = said.plan.component
            (takes,) = [most for key, most in handle.store.room.items() if key[1].component is stage]
            (needs,) = [most for key, most in lean.store.room.items() if key[1].component is stage]
            assert takes > 1.1 * needs and takes in handle.store.placement.asked and needs in asked
            assert note == (
                f"{stage.words} takes {size(takes)} beside its weights, where {size(needs)} would do: {why}"
            )


def ways(report: Any) -> list[str]:
    """That were taken where memory ran out."""
    return [note.rpartition(" with ")[2] for note in report.notes if "memory ran out" in note]


def weights_of(handle: PipelineHandle, name: str, dtype: str = "fp32") -> int:
    module = handle.store.module(name, dtype, place=False)
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def in_parts(handle: PipelineHandle, offload: Offload) -> int:
    """Bytes of the denoiser's weights that are on the card at once."""
    most = replace(handle, offload=offload).stage(Component.DENOISER).weights.most_bytes
    everything_away(handle)
    handle.store._onloading.clear()
    return most


APART, GROUP, SEQUENTIAL = "both halves of its batch one after the other", "offload 'group'", "offload 'sequential'"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", [APART, GROUP, SEQUENTIAL])
def test_a_run_with_less_room_goes_on_in_a_cheaper_way(
    card: LimitedCard, model_folder: Callable[..., Path], model: str, way: str
) -> None:
    """There is room for what the denoiser takes in this way, and half as much again of what its calls save by it."""
    handle = opened(card, model_folder(model))
    right, _ = sampled(handle, model)
    even = handle.family.guidance.calls == 1
    activations = card.made["denoiser"] * (0.8 if even else 1)
    if way == APART:
        room = weights_of(handle, handle.family.denoiser) + activations
    else:
        room = in_parts(handle, Offload(way.split("'")[1])) + activations
    with card.limited(room, only="denoiser"):
        latents, report = sampled(handle, model)
        assert card.most <= room
    taken, order = ways(report), ["nothing else on the device", *([APART] if even else []), GROUP, SEQUENTIAL]
    assert taken == order[: len(taken)]
    if way != APART or even:
        assert len(taken) > 1
    assert len(report.steps) == 2 * report.calls_per_step, "a step is one step"
    assert (latents - right).norm() <= 1e-4 * right.norm()
    again, report = sampled(handle, model)
    assert torch.equal(again, right) and not ways(report)


def test_another_component_leaves_the_card_first(card: LimitedCard, model_folder: Callable[..., Path]) -> None:
    handle = opened(card, model_folder("5b-i2v"))
    right, _ = sampled(handle, "5b-i2v")  # the VAE is on the card, too
    room = weights_of(handle, "transformer") + card.made["denoiser"]
    with card.limited(room, only="denoiser"):
        latents, report = sampled(handle, "5b-i2v")
        assert card.bytes_of(handle.store.module("vae", "fp32", place=False)) == 0
    assert not ways(report), "before memory runs out"
    assert torch.equal(latents, right)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_without_room_says_what_it_needs_and_leaves_nothing_behind(
    card: LimitedCard, model_folder: Callable[..., Path], model: str
) -> None:
    handle = opened(card, model_folder(model))
    right, _ = sampled(handle, model)
    with card.limited(1000, only="denoiser"), pytest.raises(NoRoom) as failed:
        sampled(handle, model)
    text = str(failed.value)
    assert text.startswith("denoiser: memory ran out, in every way")
    assert "Tried: nothing else on the device; " in text and SEQUENTIAL in text
    assert "cpu:0 has 0.001 MB, " in text and "A call needs " in text and " of weights and " in text
    assert "smaller size, fewer frames" in text
    assert isinstance(failed.value, torch.OutOfMemoryError), "ComfyUI then unloads its models, too"
    assert card.bytes_of(handle.store.module(handle.family.denoiser, "fp32", place=False)) == 0
    assert torch.equal(sampled(handle, model)[0], right)


@pytest.mark.parametrize("stage", ["text_encoder", "vae_encode", "vae_decode"])
def test_each_stage_ends_with_what_it_needs(card: LimitedCard, model_folder: Callable[..., Path], stage: str) -> None:
    handle = opened(card, model_folder("5b-i2v"))
    with card.limited(1000, only=stage), pytest.raises(NoRoom, match=stage.replace("_", " ")):
        decode(handle, sampled(handle, "5b-i2v")[0])
    decode(handle, sampled(handle, "5b-i2v")[0])


def test_a_text_encoder_goes_on_in_parts(card: LimitedCard, model_folder: Callable[..., Path]) -> None:
    handle = opened(card, model_folder("2b"))
    right, _ = encode_prompts(handle, ["a red kite"])
    made = card.made["text_encoder"]
    handle.store.prompts.clear()
    with card.limited(made + 0.8 * weights_of(handle, "text_encoder"), only="text_encoder"):
        embeddings, report = encode_prompts(handle, ["a red kite"])
    assert ways(report)[:2] == ["nothing else on the device", GROUP]
    assert torch.equal(embeddings[0], right[0])


@pytest.mark.parametrize(("model", "how"), [("2b", "tiling"), ("cogview3", "tiling"), ("svd", "2 at once")])
def test_decoding_with_less_room_goes_on_in_smaller_parts(
    card: LimitedCard, model_folder: Callable[..., Path], model: str, how: str
) -> None:
    handle = opened(card, model_folder(model))
    latents, _ = sampled(handle, model)
    (right, _), most = most_of(card, handle, lambda: decode(handle, latents))
    with card.limited(most - 1, only="vae_decode"):
        frames, report = decode(handle, latents)
    assert ways(report) == ["nothing else on the device", how]
    assert frames.shape == right.shape and (frames - right).abs().mean() < 0.2  # tiles of a small VAE are not alike
    assert torch.equal(decode(handle, latents)[0], right)


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
def test_what_says_that_memory_ran_out(error: RuntimeError, is_one: bool) -> None:
    assert ran_out(error) is is_one


def test_what_is_no_lack_of_memory_is_not_tried_again(
    card: LimitedCard, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = opened(card, model_folder("2b"))
    embed = handle.store.module("transformer", "fp32", place=False).patch_embed
    forward, called = embed.forward, []

    def broken(text: torch.Tensor, *given: Any) -> Any:
        if text.is_meta:  # where it is counted
            return forward(text, *given)
        called.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(embed, "forward", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampled(handle, "2b")
    assert len(called) == 1


def test_a_rerun_in_fp32_has_the_same_ladder(card: LimitedCard, model_folder: Callable[..., Path]) -> None:
    """There is room for a step in half precision, and none for the same step in float32."""
    handle = opened(card, model_folder("2b"), precision="bf16")
    right, _ = sampled(handle, "2b")
    block = handle.store.module("transformer", "bf16", place=False).transformer_blocks[1]

    def overflows(_block: Any, _given: Any, made: Any) -> Any:
        return tuple(part * float("nan") if part.dtype == torch.bfloat16 else part for part in made)

    hook = block.register_forward_hook(overflows)
    room = weights_of(handle, "transformer", "bf16") + 1.05 * card.made["denoiser"]
    with card.limited(room, only="denoiser"):
        latents, report = sampled(handle, "2b")
    hook.remove()
    assert report.reruns >= 1 and latents.isfinite().all()
    assert ways(report)[:2] == ["nothing else on the device", APART]
    assert (latents - right).norm() <= 0.05 * right.norm()
