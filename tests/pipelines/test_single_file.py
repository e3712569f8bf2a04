"""ComfyUI's single SVD file: the tables fit the real file's keys, and small files load or are refused with a reason.

tests/comfyui/inside/single_file.py checks against ComfyUI's own SVD that weights land in the right places.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import shared_models
import svd_layout
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.families import svd_keys
from comfyui_onediff_guard.pipelines.families.svd import SVD
from comfyui_onediff_guard.pipelines.insight.vram_estimate import PUBLISHED
from comfyui_onediff_guard.pipelines.models import single_file
from comfyui_onediff_guard.pipelines.models.folder import is_single_file
from comfyui_onediff_guard.pipelines.models.on_disk import Tensor
from comfyui_onediff_guard.pipelines.models.single_file import read_svd
from safetensors.torch import load_file, save_file

COMPONENTS = ("unet", "vae", "image_encoder")
UNET, VAE, CLIP = svd_keys.PREFIXES.values()


Tensors = dict[str, Tensor]
KEYS = json.loads((Path(__file__).parent / "svd_xt_keys.json").read_text(encoding="utf-8"))


def tensors_of(shapes: dict[str, Any]) -> Tensors:
    return {key: Tensor("F16", tuple(shape)) for key, shape in shapes.items()}


@pytest.fixture(scope="module")
def real() -> Tensors:
    return tensors_of(KEYS["shapes"])


@pytest.fixture(scope="module")
def small() -> Path:
    return shared_models.svd_file()


def test_small_files_are_laid_out_like_the_real_one(real: Tensors):
    assert tensors_of(svd_layout.shapes(svd_layout.REAL)) == real


def test_every_real_key_is_used_once_and_every_parameter_filled(real: Tensors):
    used: Counter[str] = Counter()
    for name in COMPONENTS:  # raises if one is missing or left over
        used.update({key for key in single_file.fit("svd_xt.safetensors", name, real)[1].values() if key})
    assert set(used.values()) == {1}
    left = real.keys() - used.keys()
    assert left and all(key.startswith(svd_keys.UNUSED) and not key.startswith(CLIP) for key in left)
    assert len(left) + len(used) == 2446


@pytest.mark.parametrize("name", COMPONENTS)
def test_configs_equal_published_ones(real: Tensors, name: str):
    """config.json of https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt, component by component."""
    configs = single_file.fit("", name, real)[0], PUBLISHED["SVD-XT"].configs[name]
    found, published = (json.loads(json.dumps(SVD.components[name].defaults() | dict(config))) for config in configs)
    assert found == published


@pytest.mark.parametrize("layout", [svd_layout.TINY, svd_layout.Layout((64, 64, 128), (False, True, True), blocks=2)])
def test_sizes_in_config_are_read_from_shapes_of_tensors(layout: svd_layout.Layout):
    found = tensors_of(svd_layout.shapes(layout, unused=False))
    config = single_file.fit("", "unet", found)[0]
    assert config["block_out_channels"] == [*layout.channels] and config["layers_per_block"] == layout.blocks
    assert ["Cross" in name for name in config["down_block_types"]] == [*layout.attends]
    assert single_file.fit("", "vae", found)[0]["block_out_channels"] == [*layout.vae_channels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMPONENTS)
def test_component_is_complete_and_in_requested_dtype(small: Path, name: str, dtype: torch.dtype):
    with torch.inference_mode():  # as inside ComfyUI
        module = read_svd(small).component(name, dtype)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {dtype}
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    for tensor in (*module.parameters(), *module.buffers()):
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference()


@pytest.mark.parametrize("name", COMPONENTS)
def test_loaded_parameter_equals_stored_one(small: Path, name: str):
    """Also of the VAE's quant_conv, which the file lacks: loading in fp16 needs each parameter with small values."""
    file = read_svd(small)
    for parameter, values in file.component(name, torch.float32).named_parameters():
        assert torch.equal(file.stored(name, (parameter,)), values)


def test_group_norms_of_unet_have_eps_of_original(small: Path):
    """GroupNorm32 of generative-models and ComfyUI has GroupNorm's default; some blocks of diffusers do not."""
    norms = {
        name: module.eps
        for name, module in read_svd(small).component("unet", torch.float32).named_modules()
        if isinstance(module, torch.nn.GroupNorm)
    }
    assert {eps for name, eps in norms.items() if "attentions" not in name} == {torch.nn.GroupNorm(1, 1).eps}
    assert {eps for name, eps in norms.items() if "attentions" in name} == {1e-6}


def test_loaded_weights_do_not_change_with_file(small: Path, tmp_path: Path):
    file = shutil.copyfile(small, tmp_path / "svd.safetensors")
    vae: Any = read_svd(file).component("vae", torch.float32)
    before = vae.decoder.conv_in.weight.clone()
    with file.open("r+b") as stream:
        stream.seek(1000)
        stream.write(bytes(file.stat().st_size - 1000))
    assert torch.equal(vae.decoder.conv_in.weight, before)


def test_bytes_of_file_are_counted_by_component(small: Path):
    file = read_svd(small)
    tensors = load_file(small)
    for name, prefix in svd_keys.PREFIXES.items():
        n_bytes = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(prefix))
        weights = file.weights[name]
        assert (weights.files, weights.n_bytes, weights.dtypes) == ((small,), n_bytes, {"F32": n_bytes})
    assert file.notes == ()


def test_scheduler_is_the_published_one(small: Path):
    scheduler = read_svd(small).unweighted("scheduler")
    scheduler.set_timesteps(25)
    assert scheduler.sigmas[0].item() == pytest.approx(700) and scheduler.sigmas[-2].item() == pytest.approx(0.002)
    assert scheduler.timesteps[0].item() == pytest.approx(0.25 * log(700))
    assert scheduler.config.prediction_type == "v_prediction"


def test_paths_of_single_files_are_recognised(tmp_path: Path, small: Path):
    assert is_single_file(small)
    assert not is_single_file(small.parent)
    assert is_single_file(tmp_path / "gone.safetensors"), "so that the message speaks of a file"
    (tmp_path / "svd.ckpt").touch()
    assert is_single_file(tmp_path / "svd.ckpt"), "which is refused as pickled"
    assert not is_single_file(tmp_path)


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _without(*prefixes: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.startswith(prefixes)}


def _with(key: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, key: tensor}


CONV_IN = f"{UNET}input_blocks.0.0.weight"
LAYERS = {f"{CLIP}transformer.resblocks.{n}.ln_1.bias": torch.zeros(1) for n in range(9999)}
BROKEN: dict[str, tuple[Change, str]] = {
    "unknown": (lambda _: {"a.b": torch.zeros(1)}, r"checkpoint: none of its 1 tensors is 'model.*time_stack"),
    "empty": (lambda _: {}, "none of its 0 tensors is"),
    "an image model": (_without(svd_keys.SIGNATURE), r"none of its \d+ tensors is 'model.diffusion_model"),
    "frame-wise decoder": (_without(svd_keys.TEMPORAL_DECODER), "none of .* is 'first_stage_model.decoder"),
    "SV3D": (_with(f"{svd_keys.SV3D}x", torch.zeros(1)), r"it has 'conditioner.embedders.1.encoder.\*', as SV3D has"),
    "one missing": (_without(f"{UNET}out.2.bias"), "svd.safetensors/unet': its files lack 'conv_out.bias', which"),
    "no size": (_without(f"{CLIP}conv1.weight"), r"no CLIPVision\w+ can be built from .*KeyError"),
    "left over": (_with(f"{UNET}scaled_fp8", torch.zeros(2)), f"unet': its files hold '{UNET}scaled_fp8', which"),
    "wrong shape": (_with(f"{UNET}out.0.bias", torch.zeros(7)), r"'conv_norm_out.bias' has the shape \[7\], but"),
    "wrong rank": (_with(CONV_IN, torch.zeros(())), "no UNet.* can be built from the sizes .*IndexError"),
    "impossible sizes": (
        _with(f"{UNET}input_blocks.1.0.out_layers.3.weight", torch.zeros(65, 64, 3, 3)),
        "no UNet.* can be built from the sizes of its tensors",
    ),
    "layers without end": (lambda tensors: tensors | LAYERS, "image_encoder': its files hold .* more, which"),
    "dots without end": (_with(f"{CLIP}{'.' * 900}", torch.zeros(1)), r"its files hold 'cond.*\.\.…, which"),
    "sizes without end": (
        _with(f"{CLIP}conv1.weight", torch.empty(2**40, 3, 0, 0)),
        "no CLIP.* can be built from .*its 'hidden_size' is 1099511627776",
    ),
    "an escape for a name": (_with(f"{UNET}\x1b[2J", torch.zeros(1)), "^[^\x1b]*unet': its files hold[^\x1b]*$"),
    "quantised": (_with(CONV_IN, torch.zeros(64, 8, 3, 3, dtype=torch.int8)), "'conv_in.weight' is stored as I8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_file_is_refused_with_reason(tmp_path: Path, small: Path, case: str):
    change, message = BROKEN[case]
    file = tmp_path / "svd.safetensors"
    save_file(change(load_file(small)), file)
    with pytest.raises(BadFolder, match=message):
        read_svd(file)


def test_unreadable_file_is_refused_with_reason(tmp_path: Path, small: Path):
    content = small.read_bytes()
    for name, written, message in (
        ("svd.safetensors", content[:-1], r"cannot be used: it has \d+(,\d+)* bytes"),
        ("svd.safetensors", content[:100], "svd.safetensors' cannot be used: it "),
        ("svd.safetensors", b"version https://git-lfs.github.com/spec/v1", "svd.safetensors' cannot be used: it "),
        ("svd.safetensors", b"", "svd.safetensors' cannot be used: it "),
        ("svd.ckpt", b"", "is not a .safetensors file. Other files hold pickled weights"),
    ):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(BadFolder, match=message):
            read_svd(tmp_path / name)
    with pytest.raises(BadFolder, match=r"gone.safetensors' cannot be read"):
        read_svd(tmp_path / "gone.safetensors")


def test_tensors_that_no_component_uses_are_noted(tmp_path: Path, small: Path):
    file = tmp_path / "svd.safetensors"
    save_file({**load_file(small), "model_ema.decay": torch.zeros(1)}, file)
    assert read_svd(file).notes == ("the file holds unused tensors: model_ema.decay",)
