"""ComfyUI's single SVD file: the tables hold for the real file's keys, and a small one loads or is refused in words.

That the weights land in the right places is shown in tests/comfyui/test_svd_single_file.py, by ComfyUI's own SVD.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import safetensors
import shared_models
import svd_layout
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.families import svd_keys
from comfyui_onediff_guard.pipelines.families.svd import SVD
from comfyui_onediff_guard.pipelines.models import single_file
from comfyui_onediff_guard.pipelines.models.recognised import is_single_file
from comfyui_onediff_guard.pipelines.models.single_file import load_component, load_unweighted, read_svd
from diffusers import StableVideoDiffusionPipeline
from safetensors.torch import load_file, save_file

COMPONENTS = ("unet", "vae", "image_encoder")
UNET, VAE, CLIP = svd_keys.PREFIXES.values()


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "svd_xt_keys.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shapes(real: dict[str, Any]) -> svd_keys.Shapes:
    return {key: tuple(shape) for key, shape in real["shapes"].items()}


@pytest.fixture(scope="module")
def small() -> Path:
    return shared_models.svd_file()


def test_committed_list_is_the_real_files(real: dict[str, Any]):
    """DiffSynth-Studio knows the real file by this hash of all its keys and shapes."""
    parts = []
    for key, shape in real["shapes"].items():
        parts += [key, f"{key}:{'_'.join(map(str, shape))}"]
    assert hashlib.md5(",".join(sorted(parts)).encode()).hexdigest() == real["md5"]


def test_small_files_are_laid_out_like_the_real_one(shapes: svd_keys.Shapes):
    assert svd_layout.shapes(svd_layout.REAL) == shapes


def test_every_real_key_is_used_once_and_every_parameter_filled(shapes: svd_keys.Shapes):
    used: Counter[str] = Counter()
    for name in COMPONENTS:
        config, sources = single_file.fit("svd_xt.safetensors", name, shapes)  # raises where one is missing or over
        parameters = SVD.components[name].on_meta(config).state_dict()
        assert sources.keys() == parameters.keys()
        for key, source in sources.items():
            if source.key:
                assert single_file._shape_of(source, shapes) == tuple(parameters[key].shape), key
        thirds = Counter(source.key for source in sources.values() if source.key)
        assert set(thirds.values()) <= {1, 3}  # query, key and value of CLIP's attention come from one tensor
        assert {key for key, n in thirds.items() if n == 3} == {key for key in thirds if ".attn.in_proj_" in key}
        used.update(thirds.keys())
    assert set(used.values()) == {1}
    left = shapes.keys() - used.keys()
    assert left and all(key.startswith(tuple(svd_keys.UNUSED)) and not key.startswith(CLIP) for key in left)
    assert len(left) + len(used) == 2446


def test_configs_are_those_that_are_published(shapes: svd_keys.Shapes):
    """config.json of https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt, component by component."""
    assert single_file.fit("", "unet", shapes)[0] == {
        "sample_size": 96,
        "in_channels": 8,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 3 + ("DownBlockSpatioTemporal",),
        "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 3,
        "block_out_channels": (320, 640, 1280, 1280),
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 768,
        "layers_per_block": 2,
        "cross_attention_dim": 1024,
        "transformer_layers_per_block": 1,
        "num_attention_heads": (5, 10, 20, 20),
        "num_frames": 25,
    }
    assert single_file.fit("", "unet", shapes, 14)[0]["num_frames"] == 14
    assert single_file.fit("", "vae", shapes)[0] == {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "sample_size": 768,
        "scaling_factor": 0.18215,
        "force_upcast": True,
    }
    assert single_file.fit("", "image_encoder", shapes)[0] == {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
        "hidden_act": "gelu",
    }


@pytest.mark.parametrize("layout", [svd_layout.TINY, svd_layout.Layout((64, 64, 128), (False, True, True), blocks=2)])
def test_other_sizes_are_read_from_the_shapes(layout: svd_layout.Layout):
    found = svd_layout.shapes(layout, unused=False)
    config, _ = single_file.fit("", "unet", found)
    assert config["block_out_channels"] == layout.channels and config["layers_per_block"] == layout.blocks
    assert ["Cross" in name for name in config["down_block_types"]] == list(layout.attends)
    assert single_file.fit("", "vae", found)[0]["block_out_channels"] == layout.vae_channels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMPONENTS)
def test_component_is_whole_and_in_the_dtype(small: Path, name: str, dtype: torch.dtype):
    with torch.inference_mode():  # as inside ComfyUI
        module = load_component(small, name, dtype)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {dtype}
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    for tensor in (*module.parameters(), *module.buffers()):
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference()


def test_unet_has_the_files_eps(small: Path):
    """generative-models' and ComfyUI's GroupNorm32 leave GroupNorm's default; some of diffusers' blocks do not."""
    norms = {
        name: module.eps
        for name, module in load_component(small, "unet", torch.float32).named_modules()
        if isinstance(module, torch.nn.GroupNorm)
    }
    assert {eps for name, eps in norms.items() if "attentions" not in name} == {torch.nn.GroupNorm(1, 1).eps}
    assert {eps for name, eps in norms.items() if "attentions" in name} == {1e-6}


def test_loading_reads_the_components_tensors_alone(small: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    open_file = safetensors.safe_open

    class Noting:
        def __init__(self, *arguments: Any, **options: Any):
            self.file = open_file(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_: object):
            self.file.__exit__(None, None, None)

        def get_tensor(self, key: str) -> torch.Tensor:
            read.append(key)
            return self.file.get_tensor(key)

    file = read_svd(small)
    monkeypatch.setattr(safetensors, "safe_open", Noting)
    load_component(file, "vae", torch.float16)
    assert read and all(key.startswith(VAE) for key in read) and max(Counter(read).values()) == 1


def test_the_file_is_mapped_part_by_part(small: Path, monkeypatch: pytest.MonkeyPatch):
    """Its pages count as this process's memory for as long as it is mapped."""
    whole = load_component(small, "unet", torch.float16).state_dict()
    maps: list[Path] = []

    def safe_open(path: Path, **options: Any) -> Any:
        maps.append(path)
        return original(path, **options)

    original = safetensors.safe_open
    file = read_svd(small)
    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    monkeypatch.setattr(single_file, "_MAPPED_AT_ONCE", 100_000)
    parts = load_component(file, "unet", torch.float16).state_dict()
    assert len(maps) > 10
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


def test_loaded_weights_outlive_the_file(small: Path, tmp_path: Path):
    file = shutil.copyfile(small, tmp_path / "svd.safetensors")
    vae: Any = load_component(file, "vae", torch.float32)
    before = vae.decoder.conv_in.weight.clone()
    with file.open("r+b") as stream:
        stream.seek(1000)
        stream.write(bytes(file.stat().st_size - 1000))
    assert torch.equal(vae.decoder.conv_in.weight, before)


def test_the_file_is_weighed_by_component(small: Path):
    file = read_svd(small)
    tensors = load_file(small)
    for name, prefix in svd_keys.PREFIXES.items():
        n_bytes = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(prefix))
        weights = file.weights[name]
        assert (weights.files, weights.n_bytes, weights.dtypes) == ((small,), n_bytes, {"F32": n_bytes})
    assert file.notes == ()


def test_pipeline_of_its_parts_makes_a_video():
    from PIL import Image

    file = read_svd(shared_models.svd_file(image=224, patch=56))  # the pipeline always shows CLIP 224 pixels
    parts: dict[str, Any] = {name: load_component(file, name, torch.float32) for name in COMPONENTS}
    for name in ("scheduler", "feature_extractor"):
        parts[name] = load_unweighted(name)
    pipeline = StableVideoDiffusionPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        Image.new("RGB", (32, 32), "orange"),
        width=32,
        height=32,
        num_frames=3,
        num_inference_steps=2,
        decode_chunk_size=3,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    assert frames.shape == (1, 3, 3, 32, 32)
    assert frames.isfinite().all() and frames.std() > 0.01


def test_scheduler_is_the_published_one():
    scheduler = load_unweighted("scheduler")
    scheduler.set_timesteps(25)
    assert scheduler.sigmas[0].item() == pytest.approx(700) and scheduler.sigmas[-2].item() == pytest.approx(0.002)
    assert scheduler.timesteps[0].item() == pytest.approx(0.25 * log(700))
    assert scheduler.config.prediction_type == "v_prediction"


def test_which_paths_are_single_files(tmp_path: Path, small: Path):
    assert is_single_file(small)
    assert not is_single_file(small.parent)
    assert is_single_file(tmp_path / "gone.safetensors"), "so that the message speaks of a file"
    (tmp_path / "svd.ckpt").touch()
    assert is_single_file(tmp_path / "svd.ckpt"), "which is refused as pickled"
    assert not is_single_file(tmp_path)


NOT_SVD = {  # keys by which it is told → what it is called
    "a Stable Diffusion 1 checkpoint": [f"{UNET}input_blocks.0.0.weight", "cond_stage_model.transformer.text_model.x"],
    "a Stable Diffusion 2 checkpoint": [f"{UNET}input_blocks.0.0.weight", "cond_stage_model.model.ln_final.weight"],
    "a Stable Diffusion XL checkpoint": [
        f"{UNET}label_emb.0.0.weight",
        "conditioner.embedders.0.transformer.text_model.x",
        "conditioner.embedders.1.model.ln_final.weight",
    ],
    "a Stable Diffusion XL refiner": [f"{UNET}out.0.bias", "conditioner.embedders.0.model.ln_final.weight"],
    "a Stable Diffusion 3 checkpoint": [f"{UNET}joint_blocks.0.context_block.attn.qkv.weight"],
    "a Flux model": ["double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight"],
    "a HunyuanVideo model": ["txt_in.individual_token_refiner.blocks.0.norm1.weight"],
    "a Wan model": ["head.modulation", "blocks.0.cross_attn.k.weight"],
    "an LTX-Video model": ["adaln_single.emb.timestep_embedder.linear_1.bias", "patchify_proj.weight"],
    "a CogVideoX transformer": ["patch_embed.text_proj.weight", "transformer_blocks.0.attn1.norm_q.weight"],
    "an SV3D checkpoint": [f"{svd_keys.SIGNATURE}in_layers.0.weight", "conditioner.embedders.1.encoder.x"],
    "a LoRA": ["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"],
    "the UNet of a diffusers-format SVD folder": ["down_blocks.0.resnets.0.temporal_res_block.norm1.weight"],
    "an image model": [f"{UNET}input_blocks.0.0.weight"],
    "a VAE": ["encoder.conv_in.weight", "decoder.conv_in.weight"],
}


@pytest.mark.parametrize("what", NOT_SVD)
def test_another_model_is_named(tmp_path: Path, what: str):
    file = tmp_path / "model.safetensors"
    save_file({key: torch.zeros(1) for key in NOT_SVD[what]}, file)
    with pytest.raises(BadFolder, match=f"^'model.safetensors' is {what}, not a Stable Video Diffusion checkpoint"):
        read_svd(file)


Tensors = dict[str, torch.Tensor]


def _without(*prefixes: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.startswith(prefixes)}


def _with(key: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, key: tensor}


CONV_IN = f"{UNET}input_blocks.0.0.weight"
BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "unknown": (
        lambda _: {"a.b": torch.zeros(1)},
        r"is not an SVD checkpoint: none of its 1 tensors \(the first is 'a.b'",
    ),
    "empty": (lambda _: {}, "is not an SVD checkpoint: none of its 0 tensors is"),
    "UNet alone": (
        _without(VAE, CLIP),
        r"without its VAE \(first_stage_model.\*\) and its image encoder \(conditioner",
    ),
    "frame-wise decoder": (_without(svd_keys.TEMPORAL_DECODER), "decodes frame by frame"),
    "one missing": (_without(f"{UNET}out.2.bias"), r"its UNet lacks 1 tensor \('conv_out.bias'\)"),
    "several missing": (
        _without(f"{VAE}encoder.mid.attn_1"),
        r"its VAE lacks 10 tensors \('encoder.mid_block.attentions.0.group_norm.bias' and others\)",
    ),
    "no size": (_without(f"{CLIP}conv1.weight"), "its image encoder lacks a tensor that tells its size"),
    "left over": (_with(f"{UNET}scaled_fp8", torch.zeros(2)), rf"its UNet has 1 tensor \('{UNET}scaled_fp8'\) that"),
    "a shortcut too many": (
        _with(f"{VAE}encoder.down.0.block.1.nin_shortcut.weight", torch.zeros(32, 32, 1, 1)),
        rf"has 1 tensor \('{VAE}encoder.down.0.block.1.nin_shortcut.weight'\) that a model of its sizes has not",
    ),
    "wrong shape": (
        _with(f"{UNET}out.0.bias", torch.zeros(7)),
        rf"'{UNET}out.0.bias' of shape \[7\], which does not fit \[64\] in diffusers' 'conv_norm_out.bias'",
    ),
    "wrong rank": (_with(CONV_IN, torch.zeros(())), "lacks a tensor that tells its size, or has an odd one"),
    "impossible sizes": (
        _with(f"{UNET}input_blocks.1.0.out_layers.3.weight", torch.zeros(65, 64, 3, 3)),
        "its UNet has sizes of which no model can be built",
    ),
    "layers without end": (
        lambda tensors: {
            **tensors,
            **{f"{CLIP}transformer.resblocks.{n}.ln_1.bias": torch.zeros(1) for n in range(9999)},
        },
        "its image encoder has 9935 tensors",
    ),
    "dots without end": (_with(f"{CLIP}{'.' * 900}", torch.zeros(1)), "its image encoder has 1 tensor"),
    "sizes without end": (
        _with(f"{CLIP}conv1.weight", torch.empty(2**40, 3, 0, 0)),
        "its image encoder has sizes of which no model can be built: hidden_size is 1099511627776",
    ),
    "an escape for a name": (_with(f"{UNET}\x1b[2J", torch.zeros(1)), "^[^\x1b]*its UNet has 1 tensor[^\x1b]*$"),
    "quantised": (_with(CONV_IN, torch.zeros(64, 8, 3, 3, dtype=torch.int8)), "as I8: quantised weights are not"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_words(tmp_path: Path, small: Path, case: str):
    change, message = BROKEN[case]
    file = tmp_path / "svd.safetensors"
    save_file(change(load_file(small)), file)
    with pytest.raises(BadFolder, match=message):
        read_svd(file)


def test_unreadable_files_are_refused_in_words(tmp_path: Path, small: Path):
    content = small.read_bytes()
    for name, written, message in (
        ("svd.safetensors", content[:-1], r"not a whole safetensors file \(\d+(,\d+)* bytes\)"),
        ("svd.safetensors", content[:100], "not a whole safetensors file"),
        ("svd.safetensors", b"version https://git-lfs.github.com/spec/v1", "not a whole safetensors file"),
        ("svd.safetensors", b"", "not a whole safetensors file"),
        ("svd.ckpt", b"", "is not a .safetensors file. Others hold pickled weights"),
    ):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(BadFolder, match=message):
            read_svd(tmp_path / name)
    with pytest.raises(BadFolder, match="is not there any more"):
        read_svd(tmp_path / "gone.safetensors")


def test_tensors_that_no_component_uses_are_noted(tmp_path: Path, small: Path):
    file = tmp_path / "svd.safetensors"
    save_file({**load_file(small), "model_ema.decay": torch.zeros(1)}, file)
    assert read_svd(file).notes == ("the file has 1 tensor ('model_ema.decay') that no component uses",)
