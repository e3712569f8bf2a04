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
    train_lora(folder, model_folder("2b"), "2b.safetensors", TARGETS, seed=1)
    train_lora(folder, model_folder("2b"), "2b-other.safetensors", TARGETS, seed=2)
    return root


@pytest.fixture(autouse=True)
def folders(model_folder, loras, tmp_path):
    models = [model_folder("2b").parent, loras]
    with host.plain_folders(models=models, input=tmp_path, output=tmp_path):
        yield


def load():
    return GRAPHS["2b"].load(Path("2b-none"), precision="fp32")


def with_lora(pipeline, name="2b.safetensors", strength=1.0, **more):
    return call("LoadLoRA", pipeline=pipeline, lora=name, strength=strength, **more)["result"][0]


def sample(pipeline):
    encoded = GRAPHS["2b"].encode(pipeline, precision="fp32")["result"]
    latents, report = GRAPHS["2b"].sample(pipeline, encoded, scheduler="DDIM")["result"]
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


def test_unusable_lora_is_refused_before_weights_are_read(model_folder):
    """tests/pipelines/test_lora_files.py has the other reasons, and test_bad_input.py missing files."""
    pipeline = GRAPHS["svd"].load(model_folder("svd"))
    with pytest.raises(BadLora, match="has no LoRA for Stable Video Diffusion"):
        with_lora(pipeline)
    assert not pipeline.store.loaded()


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
