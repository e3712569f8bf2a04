"""Whole sampling runs whose linear layers accumulate in fp16, by a model of tensor cores on a CPU that stands for a
GeForce card (benchmarks/fp16_sums_on_cpu.py). What a card's own kernel makes is another thing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import summing
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision import fp16_sums as layers_of
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, named
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.policy import Component, PlanImpossible, Precision, choose
from comfyui_onediff_guard.precision.profile_store import parse
from comfyui_onediff_guard.precision.sums import BUDGET, Sums
from fp16_sums_on_cpu import Fp16SumsOnCpu, a_card_with_fp16_sums
from safetensors.torch import save_file
from small_runs import sampled

AUTO, FP16 = Accumulation.AUTO, Accumulation.FP16
BROKEN = {"2b": "transformer_blocks.1.attn1.to_q", "svd": "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"}
NORM = {"2b": "transformer_blocks.1.norm1.norm", "svd": "down_blocks.0.attentions.0.transformer_blocks.0.norm1"}
DENOISER = {"2b": "transformer", "svd": "unet"}


@pytest.fixture
def card() -> Iterator[Fp16SumsOnCpu]:
    with a_card_with_fp16_sums() as card:
        yield card
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PipelineHandle]:
    monkeypatch.setattr(handles, "verified_architecture", lambda *_: ARCHITECTURES["sm89"])

    def open_in(folder: Path, accumulation: Accumulation = FP16, backend: str = "eager", **more: Any) -> PipelineHandle:
        options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement(), "profiles": tmp_path / "kept"}
        options |= {"precision": Precision.FP16, "backend": backend, "accumulation": accumulation}
        return load(folder, family_of(folder), **options | more)

    return open_in


@pytest.fixture
def overflowing(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """overflowing(model) → a folder, in which one layer's sums leave fp16's range half-way."""

    def build(model: str) -> Path:
        folder = shared_models.copied(model_folder(model), tmp_path / model)
        handle = load(folder, family_of(folder), precision=Precision.FP32, backend="eager", offload="none",
                      placement=PlainPlacement())  # fmt: skip
        module: Any = handle.store.module(DENOISER[model], "fp32")
        layer, norm = module.get_submodule(BROKEN[model]), module.get_submodule(NORM[model])
        half = layer.in_features // 2
        with torch.no_grad():
            norm.weight.zero_()
            norm.bias.fill_(64.0)
            layer.weight[:, :half], layer.weight[:, half:] = 128.0, -128.0
            module.get_submodule(
                BROKEN[model].replace("to_q", "to_out.0")
            ).weight.zero_()  # or all else is small beside
        (file,) = (folder / DENOISER[model]).glob("*.safetensors")
        save_file({k: v.contiguous().clone() for k, v in module.state_dict().items()}, file, metadata={"format": "pt"})
        return folder

    return build


def error(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made - right).norm() / right.norm())


def learned(handle: PipelineHandle) -> Sums:
    found = handle.store.learned[handle.memory_key(handle.family.denoiser, "fp16")].sums
    assert found is not None
    return found


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "wan", "svd"])
def test_every_family(opened, model_folder, card, model: str) -> None:
    folder = model_folder(model)
    plain, report = sampled(opened(folder, AUTO), model)
    assert card.launched == 0 and report.plan.fp16_sums_reason == ""
    handle = opened(folder)
    made, report = sampled(handle, model)
    found = learned(handle)
    assert found.layers and not found.overflows and 0 < found.step <= BUDGET, str(found)
    assert any(str(found) in note and note.startswith("fp16 accumulation in the ") for note in report.notes)
    assert [step.outcome for step in report.steps] == ["finite"] * len(report.steps)
    assert 0 < error(made, plain) < 4 * BUDGET
    before = card.launched
    assert torch.equal(sampled(opened(folder, AUTO), model)[0], plain), "off: not a bit is otherwise"
    assert card.launched == before


@pytest.mark.parametrize("model", BROKEN)
def test_an_overflow_on_the_way_is_found_and_its_layer_left_in_fp32(opened, overflowing, card, model: str) -> None:
    folder = overflowing(model)
    plain, report = sampled(opened(folder, AUTO), model)
    assert report.reruns == 0 and plain.isfinite().all(), "with sums in fp32 nothing is wrong"
    handle = opened(folder)
    made, report = sampled(handle, model)
    found = learned(handle)
    assert BROKEN[model] in found.overflows and BROKEN[model] not in found.layers
    assert len(found.layers) > len(found.islands), "healthy layers stay"
    assert report.reruns == 0 and report.failed == 0
    assert found.step <= BUDGET and error(made, plain) < 4 * BUDGET
    assert f"not finite in fp16: '{BROKEN[model]}'" in report.text()


def test_a_second_run_measures_nothing_nor_does_another_process(opened, model_folder, card, tmp_path: Path) -> None:
    handle = opened(model_folder("2b"))
    first, _ = sampled(handle, "2b")
    found = learned(handle)
    probed, before = card.launched, card.launched
    second, report = sampled(handle, "2b")
    steps = len(report.steps)
    assert card.launched - before == steps * len(found.layers) - 1 < probed, "the prompt is projected once"
    assert error(second, first) < 2 * BUDGET, "the first step of the first run was computed with sums in fp32"
    (kept,) = (tmp_path / "kept").glob("*.json")
    assert parse(kept.read_text(), "it").learned.sums == found
    handle.store.learned.clear()  # as in another process
    before = card.launched
    third, report = sampled(opened(model_folder("2b")), "2b")
    assert card.launched - before == steps * len(found.layers) - 1
    assert torch.equal(third, second)
    assert any("from a profile" in note and str(found) in note for note in report.notes)


def test_a_run_in_which_it_is_off_keeps_what_one_in_which_it_was_on_found(opened, model_folder, card) -> None:
    handle = opened(model_folder("2b"))
    sampled(handle, "2b")
    found, before = learned(handle), card.launched
    _, report = sampled(replace(handle, accumulation=AUTO), "2b")
    assert learned(handle) == found and card.launched == before
    assert not any("fp16 accumulation" in note for note in report.notes)


def test_a_layer_that_overflows_in_a_later_run_is_rerun_and_kept_in_fp32(opened, overflowing, card) -> None:
    handle = opened(overflowing("2b"))
    sampled(handle, "2b")
    key, found = handle.memory_key("transformer", "fp16"), learned(handle)
    names = (*found.layers, BROKEN["2b"])
    handle.store.learned[key] = replace(handle.store.learned[key], sums=Sums(layers=names))
    made, report = sampled(handle, "2b")
    assert report.steps[0].outcome == "rerun" and report.steps[0].rerun.module == BROKEN["2b"]
    assert report.steps[0].rerun.action == f"'{BROKEN['2b']}' accumulates in fp32 from the next call on"
    assert {step.outcome for step in report.steps[1:]} == {"finite"} and made.isfinite().all()
    assert learned(handle).islands == learned(handle).overflows == (BROKEN["2b"],)
    assert sampled(handle, "2b")[1].reruns == 0


@pytest.mark.parametrize("at", [1, 20, 40])
def test_an_interrupt_leaves_nothing(opened, model_folder, card, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    plain, _ = sampled(opened(model_folder("2b"), AUTO), "2b")
    handle, real, count = opened(model_folder("2b")), layers_of.linear, [0]
    handle.store.learned.clear()

    def interrupted(*args: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == at:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(layers_of, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampled(handle, "2b")
    monkeypatch.setattr(layers_of, "linear", real)
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    module = handle.store.module("transformer", "fp16")
    assert not any(isinstance(part, (layers_of.Fp16Sums, layers_of.Probed)) for part in module.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.equal(sampled(replace(handle, accumulation=AUTO), "2b")[0], plain)
    sampled(handle, "2b")
    assert learned(handle).layers


def test_a_lora_lies_around_them(opened, model_folder, card, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = "transformer_blocks.1.ff.net.0.proj"
    handle = opened(model_folder("2b"))
    outputs, inputs = handle.store.module("transformer", "fp16").get_parameter(f"{layer}.weight").shape
    shapes = {f"transformer.{layer}.lora_A.weight": (4, inputs), f"transformer.{layer}.lora_B.weight": (outputs, 4)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(drawn, tmp_path / "lora.safetensors")
    tuned = add_lora(handle, Lora(tmp_path / "lora.safetensors", 1.0))
    plain, _ = sampled(replace(tuned, accumulation=AUTO), "2b")
    made, report = sampled(tuned, "2b")
    found = learned(tuned)
    assert {f"{layer}.base_layer", f"{layer}.lora_A.lora_0"} <= {*found.layers}
    assert report.reruns == 0 and 0 < error(made, plain) < 4 * BUDGET


def test_a_step_cache_stands_around_them(opened, model_folder, card) -> None:
    handle = replace(opened(model_folder("2b")), step_cache=CachePolicy(0.5, check_every=3))
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    settings = SampleSettings(96, 64, steps=12, seed=3, frames=9, guidance_scale=3.0)
    plain, before = sample(replace(handle, accumulation=AUTO), positive, negative, settings)
    assert card.launched == 0
    made, report = sample(handle, positive, negative, settings)
    assert report.cells().count("cached") == before.cells().count("cached") > 0
    assert learned(handle).layers and report.reruns == 0 and 0 < error(made, plain) < 0.5


@pytest.mark.parametrize("offload", ["group", "sequential"])
def test_with_weights_that_come_in_parts(opened, model_folder, card, offload: str) -> None:
    """On a CPU they are all there; that the shells are made in the same order is what counts."""
    found = [sampled(opened(model_folder("2b"), offload=each), "2b")[0] for each in ("none", offload, "none")]
    assert torch.equal(found[1], found[2]), "the first measured"


def test_a_user_who_had_the_switch_on_has_it_on_afterwards(opened, model_folder) -> None:
    """As ComfyUI has, which was started with --fast fp16_accumulation."""
    matmul: Any = torch.backends.cuda.matmul
    handle = opened(model_folder("2b"))
    seen: list[bool] = []
    hook = handle.store.module("transformer", "fp16").register_forward_pre_hook(
        lambda *_: seen.append(matmul.allow_fp16_accumulation)
    )
    matmul.allow_fp16_accumulation = True
    try:
        _, report = sampled(handle, "2b")
        assert matmul.allow_fp16_accumulation and seen and not any(seen)
        (said,) = [each for each in report.switches if each.name.endswith("allow_fp16_accumulation")]
        assert said.value == "False" and "ComfyUI or another pack had it True" in said.reason
    finally:
        matmul.allow_fp16_accumulation = False
        hook.remove()


# where there is nothing to gain, or nothing to gain it by


@pytest.mark.parametrize(
    ("architecture", "precision", "said"),
    [
        ("sm90", Precision.FP16, r"nothing: sm90 \(Hopper\) multiplies no faster with it"),
        ("cpu", Precision.FP16, "nothing: CPU multiplies no faster with it"),
        ("gfx1100", Precision.FP16, "nothing: .* multiplies no faster with it"),
        ("sm89", Precision.BF16, "nothing: products of bf16 always accumulate in fp32; choose precision 'fp16'"),
        ("sm89", Precision.INT8, "nothing: products of bf16 always"),
        ("sm89", Precision.FP32, "nothing: products of fp32 always"),
        ("sm89", Precision.FP16_PLAIN, r"nothing: asked for fp16 \(plain\)"),
    ],
)
def test_where_it_gains_nothing_it_costs_nothing_and_says_so(
    architecture: str, precision: Precision, said: str
) -> None:
    plan = choose(named(architecture), VARIANTS["CogVideoX-2B"], Component.DENOISER, precision, FP16)
    assert not plan.fp16_sums
    assert re.match(said, plan.fp16_sums_reason)


def test_only_the_denoiser_is_asked_and_auto_never_chooses_it() -> None:
    for component in VARIANTS["CogVideoX-2B"].components:
        plan = choose(ARCHITECTURES["sm89"], VARIANTS["CogVideoX-2B"], component, Precision.FP16, FP16)
        assert plan.fp16_sums == (component is Component.DENOISER)
        for accumulation in (AUTO, Accumulation.FAST):
            plan = choose(ARCHITECTURES["sm89"], VARIANTS["CogVideoX-2B"], component, Precision.FP16, accumulation)
            assert not plan.fp16_sums and plan.fp16_sums_reason == ""


def test_on_a_card_that_gains_nothing_not_a_bit_is_otherwise(opened, model_folder, card) -> None:
    handle = replace(opened(model_folder("2b")), architecture=ARCHITECTURES["sm80"])
    made, report = sampled(handle, "2b")
    assert torch.equal(made, sampled(replace(handle, accumulation=AUTO), "2b")[0]) and card.launched == 0
    assert "fp16 accumulation: nothing: sm80 (Ampere) multiplies no faster with it" in report.text()


def test_a_pytorch_without_the_switch_is_named_before_anything_is_read(opened, model_folder, monkeypatch) -> None:
    monkeypatch.setattr(summing, "has_fp16_sums", lambda: False)
    with pytest.raises(PlanImpossible, match=rf"needs PyTorch 2\.7 .* this is {torch.__version__[:4]}.*'auto'"):
        opened(model_folder("2b"))
    opened(model_folder("2b"), AUTO)


# compiled


def test_compiled_the_first_step_is_not_and_later_ones_are(opened, model_folder, traced_alone: None) -> None:
    """Without the model of a card, whose mode nothing compiles under: what is compiled, and how often."""
    torch._dynamo.reset()
    handle = opened(model_folder("2b"), backend="inductor")
    handle.store.learned.clear()
    plain, _ = sampled(opened(model_folder("2b"), AUTO), "2b")
    made, report = sampled(handle, "2b")
    assert report.backend == "inductor" and report.graphs == 1, report.text()
    assert learned(handle).layers and error(made, plain) < 0.01
    _, report = sampled(handle, "2b")
    assert report.graphs == 0
    torch._dynamo.reset()


def test_backends_that_multiply_in_their_own_way_are_left_alone(opened, model_folder, card, monkeypatch) -> None:
    from comfyui_onediff_guard.pipelines.compile import backends
    from comfyui_onediff_guard.pipelines.run import denoiser

    monkeypatch.setattr(
        denoiser, "for_dtype", lambda *_: backends.BackendChoice("nexfort", "asked for", automatic=False)
    )
    monkeypatch.setattr(denoiser, "compiled", lambda half, *_, **__: half)
    _, report = sampled(opened(model_folder("2b")), "2b")
    assert card.launched == 0
    assert "fp16 accumulation in the transformer: nothing, since nexfort multiplies in its own way" in report.text()
