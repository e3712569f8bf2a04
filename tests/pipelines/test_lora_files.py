"""LoRA files: read as safetensors, or refused by name before weights are read."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadLora
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS
from comfyui_onediff_guard.pipelines.families.svd import SVD
from comfyui_onediff_guard.pipelines.models import lora
from comfyui_onediff_guard.pipelines.models.folder import inspect
from comfyui_onediff_guard.pipelines.models.lora import Lora, check_lora, with_loras
from lora_models import apply_loras, by_diffusers, call, changed, denoiser, header, saved, written

# peft's, at each adapter after the first that diffusers loads
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:Adapter 'default'")


def test_a_file_is_checked_before_any_weight_is_loaded(model_folder, trained):
    folder = model_folder("5b")
    empty = inspect(folder, COGVIDEOX).bare("transformer")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    check_lora(trained(diffusers.CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")), COGVIDEOX, empty)
    with pytest.raises(BadLora, match="this CogVideoX has no place for 10 tensors"):
        check_lora(trained(), COGVIDEOX, empty)


def halves(layer, inputs=32, outputs=32, rank=2):
    return {f"{layer}.lora_A.weight": (rank, inputs), f"{layer}.lora_B.weight": (outputs, rank)}


BLOCK = "transformer.transformer_blocks.0"
NO_PLACE = "this CogVideoX has no place for "
FOREIGN = {  # case → ({key: shape}, message)
    "SD": ({"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": (2, 8)}, f"{NO_PLACE}1 tensor"),
    "Flux": (halves("transformer.single_transformer_blocks.0.attn.to_q"), NO_PLACE),
    "Wan": (halves("diffusion_model.blocks.0.self_attn.q"), NO_PLACE),
    "SD3": (halves(f"{BLOCK}.attn.to_q"), NO_PLACE),
    "text encoder": (halves("text_encoder.encoder.block.0.layer.0.SelfAttention.q"), NO_PLACE),
    "SAT": ({"transformer.layers.0.attention.query_key_value.matrix_A.0.lora": (2, 8)}, "only LoRA and differences"),
    "deeper": (halves(f"{BLOCK}.attn1.to_q") | halves(BLOCK[:-1] + "41.attn1.to_q"), f"{NO_PLACE}2 tensors"),
    "5B's width": (halves(f"{BLOCK}.attn1.to_q", 3072, 3072), r"has the shape \[2, 3072\], expected \[2, 32\]"),
    "output": (halves(f"{BLOCK}.ff.net.2", 128, 64), r"\[64, 2\], expected \[32, 2\]"),
    "partly another's": (halves(f"{BLOCK}.attn1.to_q") | halves("text_encoder.q"), f"{NO_PLACE}2 tensors"),
    "a norm": (halves(f"{BLOCK}.norm1.norm"), f"{NO_PLACE}2 tensors"),
    "rank 0": (halves(f"{BLOCK}.attn1.to_q", rank=0), "the rank of .* is 0, expected 1 to"),
    "half": (
        {f"{BLOCK}.attn1.to_q.lora_A.weight": (2, 32)},
        "has only one of the two matrices of 'transformer_blocks.0.attn1.to_q'",
    ),
    "no LoRA": ({f"{BLOCK}.attn1.to_q.weight": (32, 32)}, "holds 1 tensor, such as '.*', but only LoRA"),
    "empty": ({}, "it holds no tensors"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_lora_of_other_model_is_refused_by_its_keys(case, tmp_path):
    shapes, message = FOREIGN[case]
    path = saved(tmp_path, {key: torch.zeros(shape) for key, shape in shapes.items()})
    with pytest.raises(BadLora, match=rf"^'changed.safetensors' .*{message}"):
        with_loras(denoiser, [Lora(path, 0.0)], COGVIDEOX)


BROKEN = {
    "pickled": (lambda _, folder: written(folder / "lora.pt", pickle.dumps({})), "it is not a safetensors file"),
    "truncated": (lambda path, folder: written(folder / "a.safetensors", path.read_bytes()[:-9]), "it has .* bytes"),
    "missing": (lambda _, folder: folder / "gone.safetensors", "gone.safetensors' cannot be read"),
    "NaN": (lambda *where: changed(*where, value=float("nan")), "is damaged: '.*' holds NaN or infinite values"),
    "PiSSA": (lambda *where: header(*where, r=4, init_lora_weights="pissa_niter_4"), "changed by 'pissa_niter_4'"),
    "DoRA": (lambda *where: header(*where, r=4, use_dora=True), "holds DoRA"),
    "alpha": (lambda *where: header(*where, r=4, lora_alpha="4"), "lora_alpha is 4: input should be a valid number"),
    "list": (lambda *where: changed(*where, metadata="[1]"), "expected an object"),
    "JSON": (lambda *where: changed(*where, metadata="{"), "it is not JSON"),
}
NO_LAYER = r"its header has an alpha for '.*', which is not a layer of this model"
SETTINGS = [  # of wrong types or out of bounds
    ({"lora_alpha": 1e300}, "lora_alpha is 1e.300: input should be less than or equal to 1000000"),
    ({"lora_alpha": True}, "lora_alpha is True"),
    ({"lora_alpha": 1, "alpha_pattern": {"to_k": "9"}}, "alpha_pattern.to_k is 9: input should be a valid number"),
    ({"lora_alpha": 1, "alpha_pattern": ["to_k"]}, "alpha_pattern is .*input should be an object"),
    ({"use_rslora": "yes"}, "use_rslora is yes: input should be a valid boolean"),
    ({"init_lora_weights": {"a": 1}}, "init_lora_weights"),
    ({"init_lora_weights": "<b>pissa"}, "weights changed by '<b>pissa'"),
    # peft runs each name as a regular expression on each layer's: one of these takes minutes there
    *(({"lora_alpha": 4, "alpha_pattern": {name: 1.0}}, NO_LAYER)
      for name in ("(a+)+$", "(.*)*to_k|x", ".*", "to_k|to_v", "no_layer", "^", "", "k" * 5000)),
]  # fmt: skip
BROKEN |= {f"settings {n}": (partial(header, r=4, **given), said) for n, (given, said) in enumerate(SETTINGS)}


@pytest.mark.parametrize("case", BROKEN)
def test_unreadable_or_unsupported_file_is_refused(case, trained, tmp_path):
    make, message = BROKEN[case]
    weights = copy.deepcopy(denoiser.state_dict())
    with pytest.raises(BadLora, match=message):
        with_loras(denoiser, [Lora(make(trained(), tmp_path))], COGVIDEOX)
    assert all(torch.equal(weights[name], tensor) for name, tensor in denoiser.state_dict().items())


@pytest.mark.parametrize("name", ["a.SAFETENSORS", "a.SafeTensors"])
def test_file_with_ending_in_capitals_is_not_read_as_pickle(name, trained, tmp_path, monkeypatch):
    """diffusers tells formats apart by the ending, in lower case only."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read as a pickle"))
    path = trained()
    file = written(tmp_path / name, path.read_bytes())
    assert torch.equal(apply_loras([file], [0.5])(**call)[0], apply_loras([path], [0.5])(**call)[0])


def test_a_file_that_is_damaged_after_the_check_is_refused(trained, tmp_path, monkeypatch):
    file = written(tmp_path / "a.safetensors", trained().read_bytes())
    header = lora.header
    monkeypatch.setattr(lora, "header", lambda path: (header(path), written(file, file.read_bytes()[:-9]))[0])
    with pytest.raises(BadLora, match=r"'a.safetensors' cannot be used: .*Download it again"):
        lora.read_lora(file, COGVIDEOX, denoiser)


def test_value_beyond_fp16_is_refused_only_in_fp16(trained, tmp_path):
    lora = Lora(changed(trained(), tmp_path, value=1e5))
    with_loras(denoiser, [lora], COGVIDEOX)
    with pytest.raises(BadLora, match=r"reaches 1e\+05, which does not fit torch.float16. Choose precision"):
        with_loras(copy.deepcopy(denoiser).half(), [lora], COGVIDEOX)


@pytest.mark.parametrize("family", [COGVIEW3PLUS, SVD], ids=lambda family: family.name)
def test_family_without_loras_in_diffusers_is_refused_by_name(family, trained):
    with pytest.raises(BadLora, match=rf"has no LoRA for {family.name}"):
        check_lora(trained(), family, denoiser)


def test_first_alpha_pattern_that_fits_layer_is_used_as_in_peft(trained):
    for pattern in ({"to_k": 1, "0.attn1.to_k": 9}, {"0.attn1.to_k": 9, "to_k": 1}):
        path = trained.__wrapped__(metadata=True, alpha_pattern=pattern)
        assert torch.equal(apply_loras([path], [1.0])(**call)[0], by_diffusers([path], [1.0]))
