"""The small folders of every family: real pipelines run them, the loader knows them, the overflow is the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import small_families
import torch
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from comfyui_onediff_guard.pipelines.families.table import FAMILIES
from comfyui_onediff_guard.pipelines.models.folder import family_of, inspect
from PIL import Image
from small_families import BUILDERS, build_cogview3, build_cogview4, build_svd

FP16_MAX = torch.finfo(torch.float16).max
SIZE = {"width": 96, "height": 64}
KNOWN = {  # builder → what the loader takes it for, and arguments that its pipeline needs
    "2b": ("CogVideoXPipeline", "CogVideoX-2B", ("prompt", "num_frames")),
    "5b": ("CogVideoXPipeline", "CogVideoX-5B", ("prompt", "num_frames")),
    "1.5": ("CogVideoXPipeline", "CogVideoX-1.5-5B", ("prompt", "num_frames")),
    "5b-i2v": ("CogVideoXImageToVideoPipeline", "CogVideoX-5B-I2V", ("prompt", "image", "num_frames")),
    "1.5-i2v": ("CogVideoXImageToVideoPipeline", "CogVideoX-1.5-5B-I2V", ("prompt", "image", "num_frames")),
    "cogview3": ("CogView3PlusPipeline", "CogView3-Plus-3B", ("prompt",)),
    "cogview4": ("CogView4Pipeline", "CogView4-6B", ("prompt",)),
    "svd": ("StableVideoDiffusionPipeline", "SVD", ("image", "num_frames")),
    "svd-xt": ("StableVideoDiffusionPipeline", "SVD-XT", ("image", "num_frames")),
}
STREAMS = [name for name in KNOWN if not name.startswith("svd")]
T5_FILES = ("special_tokens_map.json", "spiece.model", "tokenizer_config.json")
FILES = {
    "cogview3": {"tokenizer": T5_FILES},
    "2b": {"tokenizer": T5_FILES},
    "5b-i2v": {"tokenizer": T5_FILES},
    "cogview4": {"tokenizer": ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")},
    "svd": {"feature_extractor": ("preprocessor_config.json",)},
}


def picture() -> Image.Image:
    return Image.linear_gradient("L").resize((120, 80)).convert("RGB")


def load(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    pipeline = getattr(diffusers, KNOWN[name][0]).from_pretrained(folder, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(pipeline: Any, name: str, output_type: str = "pt", steps: int = 2) -> torch.Tensor:
    arguments = {"prompt": "a red balloon", "image": picture(), "num_frames": 5 if "svd" in name else 9}
    return pipeline(
        **{key: arguments[key] for key in KNOWN[name][2]},
        **SIZE,
        num_inference_steps=steps,
        output_type=output_type,
        generator=torch.Generator().manual_seed(0),
    )[0]


def denoiser(pipeline: Any) -> Any:
    return pipeline.components.get("transformer") or pipeline.unet


def predictions(pipeline: Any, name: str) -> list[torch.Tensor]:
    """What the denoiser gives at each of two steps."""
    found: list[torch.Tensor] = []
    denoiser(pipeline).register_forward_hook(lambda _module, _args, output: found.append(output[0].float()))
    run(pipeline, name, "latent")
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", KNOWN)
def test_the_real_pipeline_loads_and_runs_it(model_folder: Callable[..., Path], name: str) -> None:
    output = run(load(model_folder(name), name), name)
    frames = (5 if "svd" in name else 9,) if "num_frames" in KNOWN[name][2] else ()
    assert output.shape == (1, *frames, 3, 64, 96)
    assert output.isfinite().all()
    assert output.std() > 0.01


@pytest.mark.parametrize("name", KNOWN)
def test_the_loader_accepts_it_and_names_the_variant(model_folder: Callable[..., Path], name: str) -> None:
    pipeline, variant, _ = KNOWN[name]
    folder = model_folder(name)
    assert family_of(folder) is FAMILIES[pipeline]
    found = inspect(folder, FAMILIES[pipeline])
    assert found.variant.name == variant
    for component, spec in found.family.components.items():
        assert found.classes[component] == spec.classes[0], "as published, whatever transformers calls it"


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_healthy_model_is_finite_in_half_precision(
    model_folder: Callable[..., Path], name: str, dtype: torch.dtype
) -> None:
    pipeline = load(model_folder(name), name, dtype)
    assert run(pipeline, name, "latent", steps=1).isfinite().all()


@pytest.mark.parametrize("name", STREAMS)
def test_the_stream_overflows_in_fp16_at_each_step_and_in_nothing_else(
    model_folder: Callable[..., Path], name: str
) -> None:
    folder = model_folder(name, "stream")
    for dtype in (torch.float32, torch.bfloat16):
        assert all(step.isfinite().all() for step in predictions(load(folder, name, dtype), name)), dtype
    plain = load(folder, name, torch.float16)
    streams: list[torch.Tensor] = []
    for block in plain.transformer.transformer_blocks:
        block.register_forward_hook(lambda _module, _args, output: streams.extend(output))
    steps = predictions(plain, name)
    if name != "cogview3":
        assert all(step.isnan().all() for step in steps)
        return
    assert all(step.isfinite().all() for step in steps), "its blocks clip"
    assert max(stream.abs().max().item() for stream in streams) == FP16_MAX
    expected = predictions(load(folder, name), name)[0]
    healthy = [predictions(load(model_folder(name), name, dtype), name)[0] for dtype in (torch.float16, torch.float32)]
    assert error(*healthy) < 0.01
    assert error(steps[0], expected) > 0.2, "finite, and wrong"


@pytest.mark.parametrize("name", STREAMS)
def test_only_the_stream_overflows(model_folder: Callable[..., Path], name: str) -> None:
    pipeline = load(model_folder(name, "stream"), name)
    stream: list[float] = []
    inner: dict[str, float] = {}

    def note_stream(_module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        stream.append(min(part.abs().max().item() for part in output))

    def note_inner(label: str) -> Any:
        def note(_module: Any, _args: Any, output: torch.Tensor) -> None:
            inner[label] = max(inner.get(label, 0.0), output.abs().max().item())

        return note

    for index, block in enumerate(pipeline.transformer.transformer_blocks):
        block.register_forward_hook(note_stream)
        for part in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.norm_q", "attn1.norm_k", "ff.net.0"):
            block.get_submodule(part).register_forward_hook(note_inner(f"{index}.{part}"))
    run(pipeline, name, "latent")
    assert 2 * FP16_MAX < max(stream) < 2e6
    assert max(inner.values()) < FP16_MAX / 16, inner
    assert max(weight.abs().max().item() for weight in pipeline.transformer.state_dict().values()) < FP16_MAX


@pytest.mark.parametrize("name", FILES)
def test_the_folder_has_what_a_published_one_has(model_folder: Callable[..., Path], name: str) -> None:
    folder = model_folder(name)
    expected = {"model_index.json", "scheduler/scheduler_config.json"}
    for component, spec in FAMILIES[KNOWN[name][0]].components.items():
        if spec.weights:
            stem = "model" if spec.library == "transformers" else "diffusion_pytorch_model"
            expected |= {f"{component}/config.json", f"{component}/{stem}.safetensors"}
    expected |= {f"{component}/{file}" for component, files in FILES[name].items() for file in files}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == expected
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10e6


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (build_cogview3, {"overflow": "stream"}),
        (build_cogview4, {"overflow": "stream"}),
        (build_svd, {}),
        (build_cogvideox, {"look": "flow", "overflow": "stream"}),
        (build_cogvideox, {"variant": "1.5-i2v", "overflow": "stream"}),
    ],
)
def test_two_builds_have_the_same_bytes(tmp_path: Path, build: Callable[..., Path], options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = (build(tmp_path / name, **options) for name in "ab")
    assert torch.rand(1) == expected, "the random state is left alone"
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    other = build(tmp_path / "c", **options, seed=1)
    weights = [file for file in files if file.suffix == ".safetensors"]
    drawn = "look" not in options  # a flow is set by formulas
    assert not drawn or all((first / file).read_bytes() != (other / file).read_bytes() for file in weights)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_can_be_stored_in_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = BUILDERS[name](tmp_path / "model", dtype=dtype)
    found = inspect(folder, family_of(folder))
    stored = {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert all(set(weights.dtypes) == {stored} for weights in found.weights.values())


def test_image_to_video_is_laid_out_as_published(model_folder: Callable[..., Path]) -> None:
    for name, learned, inverted in (("5b-i2v", True, False), ("1.5-i2v", False, True)):
        pipeline = load(model_folder(name), name)
        config = pipeline.transformer.config
        assert (config.in_channels, config.out_channels) == (32, 16)
        assert config.use_learned_positional_embeddings == learned
        assert ("patch_embed.pos_embedding" in pipeline.transformer.state_dict()) == learned
        if learned:
            embed = pipeline.transformer.patch_embed
            assert error(embed._get_positional_embeddings(8, 12, 9), embed.pos_embedding) > 0.1
        assert (config.ofs_embed_dim is not None) == inverted
        assert pipeline.vae.config.invert_scale_latents == inverted


def test_schedulers_are_set_as_published(model_folder: Callable[..., Path]) -> None:
    cogview3 = load(model_folder("cogview3"), "cogview3").scheduler
    assert cogview3.config.snr_shift_scale == 4.0
    assert cogview3.alphas_cumprod[-1] == 0
    cogview4 = load(model_folder("cogview4"), "cogview4").scheduler.config
    assert (cogview4.base_shift, cogview4.max_shift, cogview4.base_image_seq_len) == (0.25, 0.75, 256)
    assert cogview4.use_dynamic_shifting
    assert cogview4.time_shift_type == "linear"
    svd = load(model_folder("svd"), "svd").scheduler
    svd.set_timesteps(25)
    assert svd.sigmas[0].item() == pytest.approx(700.0)
    assert svd.timesteps[0].item() == pytest.approx(0.25 * torch.tensor(700.0).log().item())


def test_the_glm_tokenizer_is_as_the_real_one(model_folder: Callable[..., Path]) -> None:
    tokenizer = load(model_folder("cogview4"), "cogview4").tokenizer
    short, long = tokenizer(["", "a red balloon"], padding="longest").input_ids
    start = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    assert long[:2] == start, "so that an empty prompt isn't empty"
    assert short == [tokenizer.pad_token_id] * (len(long) - 2) + start, "padded on the left"
    assert tokenizer.decode(long, skip_special_tokens=True) == "a red balloon"
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    assert max(tokenizer.get_vocab().values()) < small_families.GLM_VOCABULARY


def test_width_and_depth_can_be_chosen(tmp_path: Path) -> None:
    for build, options in (
        (build_cogview3, {"size": 256}),
        (build_cogview4, {"size": 256}),
        (build_cogvideox, {"variant": "5b"}),
    ):
        folder = build(tmp_path / build.__name__, layers=3, heads=2, head_dim=32, overflow="stream", **options)
        config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        assert (config["num_layers"], config["num_attention_heads"], config["attention_head_dim"]) == (3, 2, 32)
        assert "size" not in options or config["sample_size"] * 8 == 256


@pytest.mark.parametrize("name", ["2b", "cogview3", "cogview4", "svd"])
def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        BUILDERS[name](tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        build_cogview4(tmp_path / "model", head_dim=18)
    assert list(tmp_path.iterdir()) == []
