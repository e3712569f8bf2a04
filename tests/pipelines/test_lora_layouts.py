"""LoRA files of each public trainer, against weights that are merged by hand: all of a file is applied, or the report
names what is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadLora
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.wan import WAN
from comfyui_onediff_guard.pipelines.models.lora import Lora, check_lora, with_loras
from comfyui_onediff_guard.pipelines.models.lora_layouts import LayerNames
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from lora_models import protected, saved, video_model
from peft import LoraConfig, get_peft_model

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

RANK, SCALE = 4, 0.7
WAN_SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2}
WAN_SIZES |= {"in_channels": 16, "out_channels": 16, "text_dim": 16, "freq_dim": 16}
BLOCK = {  # of Wan, in diffusers' names → in its authors'
    **{f"attn{n}.to_{x}": f"{whose}_attn.{x}" for n, whose in ((1, "self"), (2, "cross")) for x in "qkv"},
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
BLOCKS = {f"blocks.{n}.{ours}": f"blocks.{n}.{theirs}" for n in range(2) for ours, theirs in BLOCK.items()}
ATTENTION = {ours: theirs for ours, theirs in BLOCKS.items() if "self_attn" in theirs}
PATCH = {"patch_embedding": "patch_embedding"}
EMBEDDERS = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}
NORMS = {f"blocks.0.attn1.norm_{x}": f"blocks.0.self_attn.norm_{x}" for x in "qk"}
NORMS |= {"blocks.1.attn2.norm_k": "blocks.1.cross_attn.norm_k", "blocks.1.norm2": "blocks.1.norm3"}
TABLES = {"blocks.0.scale_shift_table": "blocks.0.modulation", "scale_shift_table": "head.modulation"}
COG = [f"transformer_blocks.{n}.{x}" for n in range(3) for x in ("attn1.to_q", "attn1.to_out.0", "ff.net.0.proj")]
COG_LAYERS = {name: name for name in (*COG, "patch_embed.proj", "proj_out")}
COG_NORMS = {name: name for name in ("transformer_blocks.0.norm1.norm", "norm_final")}

PEFT = {"A": ".lora_A.weight", "B": ".lora_B.weight", "bias": ".lora_B.bias"}
ADAPTER = {"A": ".lora_A.default.weight", "B": ".lora_B.default.weight"}
KOHYA = {"A": ".lora_down.weight", "B": ".lora_up.weight", "alpha": ".alpha", "diff": ".diff", "diff_b": ".diff_b"}
OLD = {"A": ".lora.down.weight", "B": ".lora.up.weight"}
NATIVE = PEFT | {"alpha": ".alpha", "diff": ".diff", "diff_b": ".diff_b"}
LYCORIS = KOHYA | {"diff": ".w_norm", "diff_b": ".b_norm"}

Content = dict[str, dict[str, torch.Tensor]]  # layer or parameter → part → tensor


@cache
def wan(**config: Any) -> tuple[Any, dict[str, Any]]:
    """(Wan denoiser, one call's arguments)"""
    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(**WAN_SIZES | config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight += 0.1 * torch.randn(weight.shape)
    given = {"hidden_states": torch.randn(1, 16, 2, 4, 4), "encoder_hidden_states": torch.randn(1, 6, 16)}
    return model, given | {"timestep": torch.tensor([500]), "return_dict": False}


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {"Wan": (wan, WAN), "CogVideoX": (video_model, COGVIDEOX)}


def content(model: torch.nn.Module, layers: Mapping[str, str], parts: str = "A B alpha", seed: int = 1) -> Content:
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    made: Content = {}
    for index, name in enumerate(layers):
        weight = parameters.get(f"{name}.weight", parameters.get(name))
        assert weight is not None
        outputs, *inputs = weight.shape
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "A": lambda inputs=inputs: drawn(RANK, *inputs),
            "B": lambda outputs=outputs, inputs=inputs: drawn(outputs, RANK, *[1] * (len(inputs) - 1)),
            "alpha": lambda index=index: torch.tensor(1.0 + index % 5),
            "bias": lambda outputs=outputs: drawn(outputs),
            "diff": lambda weight=weight: drawn(*weight.shape),
            "diff_b": lambda outputs=outputs: drawn(outputs),
        }
        made[name] = {part: kinds[part]() for part in parts.split()}
    return made


def merged(model: Any, files: Mapping[float, Content]) -> Any:
    """A copy with all of the files merged into its weights."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for scale, made in files.items():
        for name, parts in made.items():
            weight: Any = parameters.get(f"{name}.weight", parameters.get(name))
            factor = parts["alpha"] / RANK if "alpha" in parts else 1.0
            if "A" in parts:
                weight += scale * factor * (parts["B"].flatten(1) @ parts["A"].flatten(1)).reshape(weight.shape)
            if "diff" in parts:
                weight += scale * parts["diff"]
            bias = parts.get("diff_b", parts.get("bias"))
            if bias is not None:
                layer = model.get_submodule(name)
                layer.bias = torch.nn.Parameter(scale * bias + (0 if layer.bias is None else layer.bias), False)
    return model


def error_over_effect(found: torch.Tensor, right: torch.Tensor, without: torch.Tensor) -> float:
    return float((found - right).norm() / (right - without).norm())


def written(names: Mapping[str, str], made: Content, stem: str, endings: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file. stem: of a key, with {ours}, {theirs}, or {ours_} and {theirs_} without dots."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parts in made.items():
        words = {"ours": name, "theirs": names[name]}
        words |= {f"{key}_": word.replace(".", "_") for key, word in words.items()}
        words["block_"] = names[name].replace("blocks.", "blocks_")
        tensors |= {stem.format(**words) + endings[part]: tensor.contiguous() for part, tensor in parts.items()}
    return tensors


W_ALL = BLOCKS | PATCH | EMBEDDERS
FILES: dict[str, tuple[str, str, dict[str, str], list[tuple[Mapping[str, str], str]]]] = {
    # case: (model, start of a key, endings, [(layers, parts)])
    "diffusers": ("Wan", "transformer.{ours}", PEFT, [(W_ALL, "A B")]),
    "diffusers, biases of some": ("Wan", "transformer.{ours}", PEFT, [(BLOCKS, "A B"), (EMBEDDERS, "A B bias")]),
    "peft": ("Wan", "base_model.model.{ours}", PEFT, [(W_ALL, "A B")]),
    "peft, of the authors' model": ("Wan", "base_model.model.{theirs}", PEFT, [(W_ALL, "A B")]),
    "ComfyUI": ("Wan", "diffusion_model.{theirs}", NATIVE, [(W_ALL, "A B alpha")]),
    "ComfyUI, a merged checkpoint's": ("Wan", "model.diffusion_model.{theirs}", NATIVE, [(W_ALL, "A B alpha")]),
    "diffusion-pipe": ("Wan", "diffusion_model.{theirs}", PEFT, [(BLOCKS, "A B")]),
    "ai-toolkit": ("Wan", "diffusion_model.{theirs}", PEFT, [(BLOCKS, "A B")]),
    "diffusers under ComfyUI's prefix": ("Wan", "diffusion_model.{ours}", PEFT, [(BLOCKS, "A B")]),
    "musubi": ("Wan", "lora_unet_{theirs_}", KOHYA, [(BLOCKS, "A B alpha")]),
    "musubi, attention alone": ("Wan", "lora_unet_{theirs_}", KOHYA, [(ATTENTION, "A B alpha")]),
    "VideoX-Fun": ("Wan", "lora_unet__{theirs_}", KOHYA, [(W_ALL, "A B alpha")]),
    "kohya, alphas of some": ("Wan", "lora_unet_{theirs_}", KOHYA, [(BLOCKS, "A B alpha"), (EMBEDDERS, "A B")]),
    "kohya with dots": ("Wan", "lora_unet_{block_}", KOHYA, [(BLOCKS, "A B alpha")]),
    "LyCORIS": ("Wan", "lycoris_{theirs_}", LYCORIS, [(BLOCKS, "A B alpha"), (NORMS, "diff")]),
    "DiffSynth": ("Wan", "{theirs}", ADAPTER, [(BLOCKS, "A B")]),
    "DiffSynth, whole names": ("Wan", "pipe.dit.{theirs}", ADAPTER, [(BLOCKS, "A B")]),
    "old diffusers": ("Wan", "transformer.{ours}", OLD, [(BLOCKS, "A B")]),
    "CausVid": ("Wan", "diffusion_model.{theirs}", KOHYA, [(BLOCKS | EMBEDDERS, "A B diff_b"), (NORMS, "diff"),
                (PATCH, "diff diff_b")]),
    "lightx2v": ("Wan", "diffusion_model.{theirs}", KOHYA, [(BLOCKS, "A B alpha diff_b"), (PATCH, "A B alpha diff_b"),
                 (NORMS, "diff"), (EMBEDDERS, "diff diff_b"), (TABLES, "diff")]),
    "AccVid": ("Wan", "diffusion_model.{theirs}", KOHYA, [(BLOCKS, "A B"), (EMBEDDERS, "diff_b")]),
    "biases alone": ("Wan", "diffusion_model.{theirs}", NATIVE, [(BLOCKS | PATCH, "diff_b")]),
    "differences alone": ("Wan", "diffusion_model.{theirs}", NATIVE, [(W_ALL, "diff diff_b"), (NORMS, "diff")]),
    "all of one layer": ("Wan", "diffusion_model.{theirs}", NATIVE, [(BLOCKS | PATCH, "A B alpha diff diff_b")]),
    "patch embedding alone": ("Wan", "diffusion_model.{theirs}", PEFT, [(PATCH, "A B")]),
    "Cog: diffusers": ("CogVideoX", "transformer.{ours}", PEFT, [(COG_LAYERS, "A B")]),
    "Cog: peft": ("CogVideoX", "base_model.model.transformer.{ours}", PEFT, [(COG_LAYERS, "A B")]),
    "Cog: CogVideoX-Fun": ("CogVideoX", "lora_unet__{ours_}", KOHYA, [(COG_LAYERS, "A B alpha")]),
    "Cog: kohya": ("CogVideoX", "lora_transformer_{ours_}", KOHYA, [(COG_LAYERS, "A B alpha")]),
    "Cog: DiffSynth": ("CogVideoX", "{ours}", ADAPTER, [(COG_LAYERS, "A B")]),
    "Cog: ComfyUI": ("CogVideoX", "diffusion_model.{ours}", NATIVE, [(COG_LAYERS, "A B alpha diff_b"),
                     (COG_NORMS, "diff diff_b")]),
}  # fmt: skip


def file_of(case: str, folder: Path) -> tuple[Path, Any, Any, Any, Content]:
    """(the file, denoiser, a call's arguments, family, what the file holds)"""
    kind, stem, endings, kinds = FILES[case]
    make, family = MODELS[kind]
    model, given = make()
    made: Content = {}
    for index, (layers, parts) in enumerate(kinds):
        made |= content(model, layers, parts, seed=index)
    names = W_ALL | NORMS | TABLES | COG_LAYERS | COG_NORMS
    (folder / case).mkdir()
    return saved(folder / case, written(names, made, stem, endings)), model, given, family, made


@torch.no_grad()
@pytest.mark.parametrize("case", FILES)
def test_lora_of_each_trainer_equals_merge_by_hand(case: str, tmp_path: Path) -> None:
    path, model, given, family, made = file_of(case, tmp_path)
    without, right = model(**given)[0], merged(model, {SCALE: made})(**given)[0]
    found = with_loras(model, [Lora(path, SCALE)], family)(**given)[0]
    assert error_over_effect(found, right, without) <= 1e-4
    assert not [note for note in check_lora(path, family, model) if "ignored" in note]
    assert torch.equal(model(**given)[0], without), "the model is as it was"


@torch.no_grad()
def test_two_files_add_up(tmp_path: Path) -> None:
    (one, model, given, family, first), (other, *_, second) = (
        file_of(case, tmp_path) for case in ("lightx2v", "differences alone")
    )
    right = merged(model, {SCALE: first, -0.4: second})(**given)[0]
    found = with_loras(model, [Lora(one, SCALE), Lora(other, -0.4)], family)(**given)[0]
    assert error_over_effect(found, right, model(**given)[0]) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"lora_alpha": 2}, {"lora_alpha": 2, "use_rslora": True, "lora_bias": True}])
def test_alpha_of_peft_folder_is_read_from_adapter_config(settings: dict[str, Any], tmp_path: Path) -> None:
    model, given = wan()
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, init_lora_weights=False, target_modules=["to_q", "ffn.net.2"], **settings)
    tuned = get_peft_model(copy.deepcopy(model), config)
    tuned.save_pretrained(tmp_path)
    lora = Lora(tmp_path / "adapter_model.safetensors")
    right = tuned(**given)[0]
    key = lora.key
    assert error_over_effect(with_loras(model, [lora], WAN)(**given)[0], right, model(**given)[0]) <= 1e-4
    assert check_lora(lora.path, WAN, model) == ()
    beside = tmp_path / "adapter_config.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"lora_alpha": 20}))
    assert lora.key != key, "another alpha is another LoRA"
    beside.write_text("{")
    with pytest.raises(BadLora, match=r"'adapter_model.safetensors' cannot be used: it is not JSON"):
        check_lora(lora.path, WAN, model)
    beside.write_text(json.dumps({"peft_type": "LOHA"}))
    with pytest.raises(BadLora, match="holds LOHA, but only LoRA"):
        check_lora(lora.path, WAN, model)
    beside.unlink()
    (note,) = check_lora(lora.path, WAN, model)
    assert "adapter_config.json" in note


@torch.no_grad()
@pytest.mark.parametrize(
    ("stem", "endings"), [("diffusion_model.{theirs}", NATIVE), ("lora_unet_{theirs_}", KOHYA), ("{ours}", ADAPTER)]
)
def test_image_to_video_lora_loads_without_its_image_tensors(
    stem: str, endings: dict[str, str], tmp_path: Path
) -> None:
    made_for, _ = wan(in_channels=36, image_dim=8, added_kv_proj_dim=24)
    image = {f"blocks.{n}.attn2.add_{x}_proj": f"blocks.{n}.cross_attn.{x}_img" for n in range(2) for x in "kv"}
    image |= {"condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1"} | PATCH
    parts = "A B alpha" if "alpha" in endings else "A B"
    made = content(made_for, BLOCKS, parts)
    tensors = written(BLOCKS | image, made | content(made_for, image, parts), stem, endings)
    if "diff" in endings:  # norms of the image, and a bias that was trained with the image's channels
        tensors |= written({"x": "img_emb.proj.0"}, {"x": {"diff": torch.ones(8)}}, stem, endings)
        tensors |= written(PATCH, {"patch_embedding": {"diff_b": torch.ones(24)}}, stem, endings)
    path = saved(tmp_path, tensors)
    model, given = wan()
    right, without = merged(model, {SCALE: made})(**given)[0], model(**given)[0]
    assert error_over_effect(with_loras(model, [Lora(path, SCALE)], WAN)(**given)[0], right, without) <= 1e-4
    (note,) = check_lora(path, WAN, model)
    dotted = note.replace("_", ".")
    assert all(word.replace("_", ".") in dotted for word in ("patch_embedding", "blocks"))
    assert f"{len(tensors) - len(BLOCKS) * len(parts.split())} tensors" in note
    assert "k_img" in note or "add_k_proj" in note
    only = {key: tensor for key, tensor in tensors.items() if "img" in key or "add_" in key or "image" in key}
    with pytest.raises(BadLora, match="has no place for"):
        check_lora(saved(tmp_path, only), WAN, model)


def test_names_of_original_layers_match_conversion_of_diffusers() -> None:
    model = WanTransformer3DModel(**WAN_SIZES, image_dim=8, added_kv_proj_dim=24)
    names, theirs = LayerNames(WAN, model), {}
    for name, tensor in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        layer, kind = (layer, f".{kind}") if kind in ("weight", "bias") else (name, "")
        authors = names.authors(layer)
        assert names.find(authors) == names.find(f"lora_unet_{authors.replace('.', '_')}") == layer
        theirs[authors + kind] = tensor
    assert theirs.keys() >= {"blocks.1.norm3.weight", "head.modulation", "img_emb.proj.3.bias"}
    assert convert_wan_transformer_to_diffusers(theirs).keys() == model.state_dict().keys()


KEY = "diffusion_model.blocks.0.self_attn.q"
REFUSED: dict[str, str] = {  # an additional key → message
    **dict.fromkeys((f"{KEY}.dora_scale", "transformer.blocks.0.attn1.to_q.dora_scale", f"{KEY}.lokr_w1",
                     f"{KEY}.lora_magnitude_vector.default.weight", f"{KEY}.hada_w1_a", f"{KEY}.oft_blocks",
                     "base_model.model.blocks.0.attn1.to_q.oft_R.weight", f"{KEY}.boft_s", f"{KEY}.a1.weight",
                     f"{KEY}.lora_mid.weight", f"{KEY}.ia3_l", f"{KEY}.set_weight", f"{KEY}.lora_C.weight",
                     "base_model.model.proj_out.modules_to_save.weight"), "holds 1 tensor, .*but only LoRA"),
    "transformer.blocks.0.attn1.to_q.lora_A.weight": "holds the same tensor twice",
    "diffusion_model.blocks.0.self_attn.norm_q.diff_b": "has no place for 1 tensor",  # a norm without a bias
    f"{KEY}.alpha": "has no place for 1 tensor",  # one that is no number
    "diffusion_model.blocks.7.self_attn.q.diff_b": "has no place for 1 tensor",
    "diffusion_model.blocks.0.self_attn.k.lora_B.weight": "only one of the two matrices of 'blocks.0.attn1.to_k'",
    "diffusion_model.blocks.0.norm3.diff": r"has the shape \[8\], expected \[24\]",
    "diffusion_model.blocks.1.norm3.diff": "as I8",  # written in whole numbers
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_tensor_that_cannot_be_applied_is_refused_with_reason(key: str, tmp_path: Path) -> None:
    model, _ = wan()
    made = content(model, {"blocks.0.attn1.to_q": ""}, "A B")
    tensor = torch.ones(8, dtype=torch.int8 if "I8" in REFUSED[key] else None)
    path = saved(tmp_path, written(BLOCKS, made, "diffusion_model.{theirs}", PEFT) | {key: tensor})
    with pytest.raises(BadLora, match=REFUSED[key]):
        check_lora(path, WAN, model)


def test_file_without_applicable_tensors_is_refused(tmp_path: Path) -> None:
    """It holds only what a model without an image lacks: the image's channels of the first layer."""
    model, _ = wan()
    outputs, inputs, *kernel = model.patch_embedding.weight.shape
    made = {"A": torch.ones(2, inputs + 4, *kernel), "B": torch.ones(outputs, 2, 1, 1, 1)}
    path = saved(tmp_path, {f"diffusion_model.patch_embedding.lora_{half}.weight": it for half, it in made.items()})
    with pytest.raises(BadLora, match="has no place for 2 tensors"):
        check_lora(path, WAN, model)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_differences_are_not_rounded_to_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """Rounded to bf16, a weight near 1 cannot change by less than 4e-3."""
    path, model, given, family, made = file_of("lightx2v", tmp_path)
    half = copy.deepcopy(model).to(dtype)
    before = copy.deepcopy(half.state_dict())
    with_lora: Any = with_loras(half, [Lora(path, 1e-3)], family)
    norm, original = with_lora.blocks[0].attn1.norm_q, half.blocks[0].attn1.norm_q
    assert torch.equal(norm.weight, original.weight.float() + 1e-3 * made["blocks.0.attn1.norm_q"]["diff"])
    assert norm(torch.ones(1, 24, dtype=dtype)).dtype is dtype
    inputs = given | {name: given[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}
    floats = given | {name: inputs[name].float() for name in ("hidden_states", "encoder_hidden_states")}
    right = merged(copy.deepcopy(half).float(), {SCALE: made})(**floats)[0]
    with_lora = with_loras(half, [Lora(path, SCALE)], family)
    without = copy.deepcopy(half).float()(**floats)[0]
    rerun = run_in_fp32(with_lora, **inputs)[0]
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-3  # additions by peft are rounded to the layer's dtype
    assert error_over_effect(rerun, right, without) < limit
    assert error_over_effect(with_lora(**inputs)[0].float(), right, without) < 10 * limit
    if dtype is torch.float16:
        for in_layers in (False, True):
            run = protected(with_lora, family, in_layers=in_layers)
            assert all(error_over_effect(run(**inputs)[0], right, without) < 10 * limit for _ in range(2))
    assert half.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in half.state_dict().items())
    assert {p.dtype for p in half.parameters()} == {dtype}
