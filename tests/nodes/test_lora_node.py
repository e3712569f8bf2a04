"""Load LoRA: as diffusers adds it, by its strength, and off again."""

from __future__ import annotations

import copy
import json
import math
import shutil

import diffusers
import pytest
import torch
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.errors import BadLora
from peft import LoraConfig, get_peft_model_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"]


def train(denoiser, folder, name, seed=1):
    student = copy.deepcopy(denoiser)
    torch.manual_seed(seed)
    student.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=TARGETS))
    diffusers.CogVideoXPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(student), weight_name=name
    )


@pytest.fixture(scope="module")
def loras(tmp_path_factory, model_folder):
    root = tmp_path_factory.mktemp("models")
    folder = root / "loras"
    folder.mkdir()
    for variant in ("2b", "5b"):
        denoiser = diffusers.CogVideoXTransformer3DModel.from_pretrained(model_folder(variant) / "transformer")
        train(denoiser, folder, f"{variant}.safetensors")
        train(denoiser, folder, f"{variant}-other.safetensors", seed=2)
    config = dict(denoiser.config)
    wide = diffusers.CogVideoXTransformer3DModel.from_config({**config, "num_attention_heads": 5})
    deep = diffusers.CogVideoXTransformer3DModel.from_config({**config, "num_layers": config["num_layers"] + 2})
    train(wide, folder, "wide.safetensors")
    train(deep, folder, "deep.safetensors")
    return root


@pytest.fixture(autouse=True)
def folders(model_folder, loras, tmp_path):
    models = [model_folder("2b").parent, loras]
    with host.plain_folders(models=models, input=tmp_path, output=tmp_path):
        yield


def node(name):
    return NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]()


def load(model="2b-none", precision="fp32", backend="eager"):
    (pipeline,) = node("LoadPipeline").load(model, precision, backend, "none")["result"]
    return pipeline


def with_lora(pipeline, name="2b.safetensors", strength=1.0):
    (pipeline,) = node("LoadLoRA").add(pipeline, name, strength)
    return pipeline


def sample(pipeline, steps=2):
    positive, negative = node("EncodePrompt").encode(pipeline, "a paper boat", "", "fp32")["result"]
    result = node("SampleCogVideoX").sample(
        pipeline, positive=positive, negative=negative, width=64, height=48, frames=9, steps=steps, guidance_scale=6.0,
        seed=1, scheduler="DDIM", precision="inherit", node_id="5",
    )["result"]  # fmt: skip
    return result[0]["samples"], result[1]


def by_hand(pipeline, loras, loras_root):
    """The same steps by diffusers, with the same weight tensors."""
    store = pipeline.store
    denoiser = copy.deepcopy(store.module("transformer", "fp32"))
    parts = {"text_encoder": store.module("text_encoder", "fp32"), "vae": store.module("vae", "fp32")}
    parts |= {"tokenizer": store.unweighted("tokenizer"), "scheduler": store.unweighted("scheduler")}
    parts["scheduler"] = diffusers.CogVideoXDDIMScheduler.from_config(parts["scheduler"].config)
    pipe = diffusers.CogVideoXPipeline(transformer=denoiser, **parts)
    pipe.set_progress_bar_config(disable=True)
    for index, name in enumerate(loras):
        pipe.load_lora_weights(loras_root / "loras", weight_name=name, adapter_name=f"a{index}")
    if loras:
        pipe.set_adapters([f"a{index}" for index in range(len(loras))], list(loras.values()))
    latents = pipe(
        "a paper boat", negative_prompt="", width=64, height=48, num_frames=9, num_inference_steps=2,
        guidance_scale=6.0, generator=torch.Generator().manual_seed(1), output_type="latent", max_sequence_length=226,
    ).frames  # fmt: skip
    return latents.permute(0, 2, 1, 3, 4) / pipe.vae.config.scaling_factor


@pytest.mark.parametrize(
    "chosen",
    [
        {"2b.safetensors": 1.0},
        {"2b.safetensors": -0.5},
        {"2b.safetensors": 0.7, "2b-other.safetensors": 1.5},
    ],
    ids=str,
)
def test_it_acts_as_in_diffusers(chosen, loras):
    plain = load()
    without, _ = sample(plain)
    pipeline = plain
    for name, strength in chosen.items():
        pipeline = with_lora(pipeline, name, strength)
    found, report = sample(pipeline)
    expected = by_hand(pipeline, chosen, loras)
    scale = expected.abs().max()
    assert (found - expected).abs().max() / scale < 1e-5  # copies of weights lie elsewhere in memory: a last bit
    assert (found - without).abs().max() / scale > 1e-2
    for name, strength in chosen.items():
        assert f"LoRA {name} at {strength:g}" in report


def test_taking_it_away_reloads_nothing_and_leaves_nothing():
    plain = load()
    before, _ = sample(plain)
    weights = plain.store.module("transformer", "fp32")
    sample(with_lora(plain))
    after, report = sample(plain)
    assert torch.equal(after, before) and "LoRA" not in report
    assert plain.store.module("transformer", "fp32") is weights
    assert with_lora(plain).memory_key("transformer", "fp16") != plain.memory_key("transformer", "fp16"), (
        "what it teaches is of this LoRA alone"
    )
    zero, _ = sample(with_lora(plain, strength=0.0))
    assert torch.equal(zero, before)


def test_a_transformer_that_the_model_does_not_have_is_refused_before_anything_is_loaded():
    plain = load()
    (both,) = node("LoadLoRA").add(plain, "2b.safetensors", 1.0, "both")
    assert [lora.denoiser for lora in both.loras] == [""]
    with pytest.raises(BadLora, match=r"CogVideoX-2B has no second transformer.*Choose 'both'"):
        node("LoadLoRA").add(plain, "2b.safetensors", 1.0, "low noise")
    assert not plain.store.loaded()


def test_strength_is_honoured_when_compiled_and_one_shell_is_kept():
    eager, compiled = load(), load(backend="inductor")
    for strength in (1.0, 0.25):
        expected, _ = sample(with_lora(eager, strength=strength), steps=1)
        found, _ = sample(with_lora(compiled, strength=strength), steps=1)
        assert (found - expected).abs().max() / expected.abs().max() < 1e-3
    assert len({loras for _, loras, *_ in compiled.store.compiled if loras}) == 1


def test_guarded_and_with_overflow_protection_a_lora_is_near_fp32(model_folder):
    model_folder("5b", "stream")
    expected, _ = sample(with_lora(load("5b-stream"), "5b.safetensors"), steps=3)
    found, report = sample(with_lora(load("5b-stream", "fp16"), "5b.safetensors"), steps=3)
    assert "overflow protection" in report and "3 steps, all fine" in report
    assert (found - expected).abs().max() / expected.abs().max() < 2e-2


@pytest.mark.parametrize(
    ("model", "lora", "says"),
    [
        ("2b-none", "wide.safetensors", "cannot be used: '.*' has the shape"),
        ("2b-none", "deep.safetensors", "this CogVideoX has no place for"),
        ("cogview3-none", "2b.safetensors", "has no LoRA for CogView3-Plus"),
        ("svd-none", "2b.safetensors", "has no LoRA for Stable Video Diffusion"),
        ("2b-none", "gone.safetensors", "is gone"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_before_anything_is_loaded(model, lora, says, model_folder):
    model_folder(model.removesuffix("-none"))
    pipeline = load(model)
    pipeline.store.drop("transformer")
    with pytest.raises(BadLora, match=says):
        with_lora(pipeline, lora)
    assert "transformer" not in pipeline.store.loaded() and pipeline.loras == ()


@pytest.mark.parametrize("strength", [0.0039, -0.0039, 1.0, 10.0, -10.0])
def test_a_page_keeps_the_strength_that_is_typed(strength):
    """ComfyUI's pages show, and keep, as many decimals as the step has."""
    kind, options = node("LoadLoRA").INPUT_TYPES()["required"]["strength"]
    decimals = max(0, -math.floor(math.log10(options["step"])))
    assert kind == "FLOAT" and options["min"] <= round(strength, decimals) == strength <= options["max"]


def test_the_list_and_what_changes_it(loras):
    cls = type(node("LoadLoRA"))
    assert cls.INPUT_TYPES()["required"]["lora"][0][0] == "2b-other.safetensors"
    assert "Found: 2b-other" in cls.VALIDATE_INPUTS(lora="x") and "loras" in cls.VALIDATE_INPUTS(lora="x")
    before = cls.IS_CHANGED(lora="2b.safetensors")
    (loras / "loras" / "2b.safetensors").touch()
    assert cls.IS_CHANGED(lora="2b.safetensors") != before


def test_a_folder_of_peft_changes_with_its_settings(loras):
    cls, folder = type(node("LoadLoRA")), loras / "loras" / "kite"
    folder.mkdir()
    shutil.copyfile(loras / "loras" / "2b.safetensors", folder / "adapter_model.safetensors")
    seen = set()
    for alpha in (4, 20):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha}))
        seen.add(cls.IS_CHANGED(lora="kite/adapter_model.safetensors"))
    shutil.rmtree(folder)
    assert len(seen) == 2
