"""The small CogVideoX: a folder that the real classes load, and an overflow with the real mechanism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.demo import small_model
from comfyui_onediff_guard.demo.small_model import Look, Overflow, Variant, build_cogvideox
from comfyui_onediff_guard.demo.small_tokenizer import TEXT_LENGTH
from diffusers import CogVideoXPipeline
from safetensors import safe_open

FP16_MAX = torch.finfo(torch.float16).max
SIZE = {"width": 96, "height": 64, "num_frames": 9}
LOOKS: list[tuple[Variant, Look]] = [("2b", "noise"), ("5b", "noise"), ("1.5", "noise"), ("2b", "flow")]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """build(variant, look, overflow) -> a folder, built once."""
    root = tmp_path_factory.mktemp("small")

    def folder(variant: Variant, look: Look, overflow: Overflow = "none") -> Path:
        path = root / f"{variant}-{look}-{overflow}"
        return path if path.exists() else build_cogvideox(path, variant=variant, look=look, overflow=overflow)

    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    pipeline = CogVideoXPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any, **arguments: Any) -> torch.Tensor:
    options = {**SIZE, "num_inference_steps": 2, "output_type": "latent", **arguments}
    return pipeline("a red balloon", generator=torch.Generator().manual_seed(0), **options).frames


@pytest.mark.parametrize(("variant", "look"), LOOKS)
def test_the_real_pipeline_loads_and_runs_it(build: Any, variant: Variant, look: Look) -> None:
    pipeline = load(build(variant, look))
    video = latents(pipeline, output_type="pt")
    assert video.shape == (1, 9, 3, 64, 96)
    assert video.isfinite().all()
    assert video.std() > 0.01
    spec = small_model.VARIANTS[variant]
    assert pipeline.transformer.config.use_rotary_positional_embeddings == spec.rotary
    assert pipeline.transformer.config.patch_size_t == spec.patch_size_t
    assert pipeline.vae.config.scaling_factor == spec.vae_scaling
    assert (pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal) == (8, 4)
    assert pipeline.scheduler.config.snr_shift_scale == spec.snr_shift
    assert pipeline.scheduler.alphas_cumprod[-1] == 0  # zero terminal SNR, as published


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["2b", "5b", "1.5"])
def test_a_healthy_model_is_finite_in_half_precision(build: Any, variant: Variant, dtype: torch.dtype) -> None:
    assert latents(load(build(variant, "noise"), dtype), num_inference_steps=1).isfinite().all()


@pytest.mark.parametrize(("variant", "look"), LOOKS)
def test_overflow_is_nan_in_fp16_at_each_step_and_in_nothing_else(build: Any, variant: Variant, look: Look) -> None:
    folder = build(variant, look, "stream")
    for dtype in (torch.float32, torch.bfloat16):
        assert latents(load(folder, dtype)).isfinite().all(), dtype
    pipeline = load(folder, torch.float16)
    predictions: list[torch.Tensor] = []
    pipeline.transformer.register_forward_hook(
        lambda _module, _args, output: predictions.append(output[0].clone()),
    )
    finite = torch.randn(1, 3, 16, 8, 12, generator=torch.Generator().manual_seed(0)).half()
    for steps in (1, 2):  # the second starts from finite latents too, at another timestep
        pipeline.scheduler.set_timesteps(steps)
        latents(pipeline, num_inference_steps=steps, latents=None if variant == "1.5" else finite)
    assert all(prediction.isnan().all() for prediction in predictions)


@pytest.mark.parametrize(("variant", "look"), LOOKS)
def test_only_the_stream_overflows(build: Any, variant: Variant, look: Look) -> None:
    pipeline = load(build(variant, look, "stream"))
    stream: list[float] = []
    inner: dict[str, float] = {}

    def note_stream(_module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        stream.append(min(part.abs().amax().item() for part in output))

    def note_inner(name: str) -> Any:
        def note(_module: Any, _args: Any, output: torch.Tensor) -> None:
            inner[name] = max(inner.get(name, 0.0), output.abs().max().item())

        return note

    for index, block in enumerate(pipeline.transformer.transformer_blocks):
        block.register_forward_hook(note_stream)
        for name in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.norm_q", "attn1.norm_k", "ff.net.0"):
            block.get_submodule(name).register_forward_hook(note_inner(f"{index}.{name}"))
    latents(pipeline)
    assert 2 * FP16_MAX < max(stream) < 2e6
    assert max(inner.values()) < FP16_MAX / 16, inner
    weights = pipeline.transformer.state_dict()
    assert max(weight.abs().max().item() for weight in weights.values()) < FP16_MAX


def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    first, second = (build_cogvideox(tmp_path / name, look="flow", overflow="stream") for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    other = build_cogvideox(tmp_path / "c", seed=1)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (other / weights).read_bytes() != (first / weights).read_bytes()


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build_cogvideox(tmp_path / "model")
    assert torch.rand(1) == expected


def test_the_folder_has_what_a_published_one_has(build: Any) -> None:
    folder = build("2b", "noise")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/special_tokens_map.json",
        "tokenizer/spiece.model",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    assert index["tokenizer"] == ["transformers", "T5Tokenizer"]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10e6


def test_the_tokenizer_is_a_real_one(build: Any) -> None:
    tokenizer = load(build("2b", "noise")).tokenizer
    ids = tokenizer("A red balloon", padding="max_length", max_length=TEXT_LENGTH).input_ids
    assert len(ids) == TEXT_LENGTH
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    words = ids[: ids.index(0)]
    assert words[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(words, skip_special_tokens=True) == "A red balloon"
    assert len(tokenizer) <= 384  # the text encoder's embeddings


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_can_be_stored_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = build_cogvideox(tmp_path / "model", dtype=dtype)
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            assert {weights.get_tensor(name).dtype for name in weights.keys()} == {dtype}, file  # noqa: SIM118
    assert latents(load(folder), num_inference_steps=1).isfinite().all()


def test_width_and_depth_can_be_chosen(tmp_path: Path) -> None:
    folder = build_cogvideox(tmp_path / "model", layers=3, heads=2, head_dim=32, overflow="stream", variant="5b")
    config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    assert (config["num_layers"], config["num_attention_heads"], config["attention_head_dim"]) == (3, 2, 32)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(small_model.CogVideoXPipeline, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        build_cogvideox(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="Choose another place"):
        build_cogvideox(tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "3b"}, "Choose one of 2b, 5b, 1.5"),
        ({"head_dim": 20}, "multiple of 16"),
        ({"look": "flow", "variant": "5b"}, "needs variant '2b'"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_cogvideox(tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []
