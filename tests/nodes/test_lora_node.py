"""The Load LoRA node: strength, removal, refused files, and the list of files."""

from __future__ import annotations

import json
import math
import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.nodes.lora import LoadLoRA
from comfyui_onediff_guard.pipelines.errors import BadLora
from trained_lora import train_lora

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.2")


@pytest.fixture(scope="module")
def loras(tmp_path_factory, model_folder):
    root = tmp_path_factory.mktemp("models")
    folder = root / "loras"
    folder.mkdir()
    for variant in ("2b", "5b"):
        train_lora(folder, model_folder(variant), f"{variant}.safetensors", TARGETS, seed=1)
        train_lora(folder, model_folder(variant), f"{variant}-other.safetensors", TARGETS, seed=2)
    return root


@pytest.fixture(autouse=True)
def folders(model_folder, loras, tmp_path):
    models = [model_folder("2b").parent, loras]
    with host.plain_folders(models=models, input=tmp_path, output=tmp_path):
        yield


def load(model="2b-none", **settings):
    return GRAPHS["2b"].load(Path(model), **{"precision": "fp32"} | settings)


def with_lora(pipeline, name="2b.safetensors", strength=1.0, **more):
    return call("LoadLoRA", pipeline=pipeline, lora=name, strength=strength, **more)["result"][0]


def sample(pipeline, steps=2):
    encoded = GRAPHS["2b"].encode(pipeline, precision="fp32")["result"]
    latents, report = GRAPHS["2b"].sample(pipeline, encoded, steps=steps, scheduler="DDIM")["result"]
    return latents["samples"], report


def test_each_lora_is_added_at_its_strength():
    """tests/pipelines/test_lora.py compares LoRAs with diffusers."""
    plain, strengths = load(), {"2b.safetensors": 0.7, "2b-other.safetensors": -0.5}
    pipeline, made, report = plain, [sample(plain)[0]], ""
    for name, strength in strengths.items():
        pipeline = with_lora(pipeline, name, strength)
        found, report = sample(pipeline)
        made.append(found)
    assert {lora.path.name: lora.scale for lora in pipeline.loras} == strengths and plain.loras == ()
    assert all(f"LoRA {name} at {strength:g}" in report for name, strength in strengths.items())
    assert min((a - b).abs().max() / b.abs().max() for a, b in combinations(made, 2)) > 1e-2


def test_removing_lora_reloads_nothing_and_restores_output():
    plain = load()
    before, _ = sample(plain)
    weights = plain.store.module("transformer", "fp32")
    sample(with_lora(plain))
    after, report = sample(plain)
    assert torch.equal(after, before) and "LoRA" not in report
    assert plain.store.module("transformer", "fp32") is weights
    assert with_lora(plain).memory_key("transformer", "fp16") != plain.memory_key("transformer", "fp16"), (
        "overrides are stored for each LoRA"
    )
    zero, _ = sample(with_lora(plain, strength=0.0))
    assert torch.equal(zero, before)


def test_missing_second_transformer_is_refused_before_weights_are_read():
    plain = load()
    assert [lora.denoiser for lora in with_lora(plain, transformer="both").loras] == [""]
    with pytest.raises(BadLora, match=r"CogVideoX-2B has no second transformer.*Choose 'both'"):
        with_lora(plain, transformer="low noise")
    assert not plain.store.loaded()


def test_compiled_lora_applies_strength_and_keeps_one_compiled_copy():
    eager, compiled = load(), load(backend="inductor")
    for strength in (1.0, 0.25):
        expected, _ = sample(with_lora(eager, strength=strength), steps=1)
        found, _ = sample(with_lora(compiled, strength=strength), steps=1)
        assert (found - expected).abs().max() / expected.abs().max() < 1e-3
    assert len({loras for _, loras, *_ in compiled.store.compiled if loras}) == 1


def test_lora_in_protected_fp16_is_near_fp32(model_folder):
    model_folder("5b", "stream")
    expected, _ = sample(with_lora(load("5b-stream"), "5b.safetensors"), steps=3)
    found, report = sample(with_lora(load("5b-stream", precision="fp16"), "5b.safetensors"), steps=3)
    assert "overflow protection" in report and "3 steps, all fine" in report
    assert (found - expected).abs().max() / expected.abs().max() < 2e-2


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        ("svd-none", "2b.safetensors", "has no LoRA for Stable Video Diffusion"),
        ("2b-none", "gone.safetensors", "was not found in"),
    ],
)
def test_unusable_lora_is_refused_before_weights_are_read(model, lora, message, model_folder, loras):
    model_folder(model.removesuffix("-none"))
    pipeline = load(model)
    pipeline.store.drop("transformer")
    with pytest.raises(BadLora, match=message):
        LoadLoRA().add(pipeline, lora, 1.0)
    assert "transformer" not in pipeline.store.loaded() and pipeline.loras == ()


@pytest.mark.parametrize("strength", [0.0039, -0.0039, 1.0, 10.0, -10.0])
def test_widget_keeps_typed_strength(strength):
    """ComfyUI's page shows and keeps as many decimals as the step has."""
    kind, options = LoadLoRA.INPUT_TYPES()["required"]["strength"]
    decimals = max(0, -math.floor(math.log10(options["step"])))
    assert kind == "FLOAT" and options["min"] <= round(strength, decimals) == strength <= options["max"]


def test_list_names_lora_files_and_is_changed_notices_new_file_time(loras):
    assert LoadLoRA.INPUT_TYPES()["required"]["lora"][0][0] == "2b-other.safetensors"
    answer = str(LoadLoRA.VALIDATE_INPUTS(lora="x"))
    assert "Found: 2b-other" in answer and "loras" in answer
    before = LoadLoRA.IS_CHANGED(lora="2b.safetensors")
    (loras / "loras" / "2b.safetensors").touch()
    assert LoadLoRA.IS_CHANGED(lora="2b.safetensors") != before


def test_is_changed_notices_new_settings_of_peft_folder(loras):
    folder = loras / "loras" / "kite"
    folder.mkdir()
    shutil.copyfile(loras / "loras" / "2b.safetensors", folder / "adapter_model.safetensors")
    seen = set()
    for alpha in (4, 20):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha}))
        seen.add(LoadLoRA.IS_CHANGED(lora="kite/adapter_model.safetensors"))
    shutil.rmtree(folder)
    assert len(seen) == 2
