"""Model folders: recognised, listed, fingerprinted, and checked before weights are read."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.folder import fingerprint, inspect, list_folders
from comfyui_onediff_guard.pipelines.models.lora import Lora
from hostile import checked, file_of, rewrite, say
from waiting import no_hang


@pytest.fixture
def folder(copy):
    return copy("2b")


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("2b", "CogVideoX-2B"), ("5b", "CogVideoX-5B"), ("1.5", "CogVideoX-1.5-5B")),
        *(("wan", "Wan2.1-T2V-1.3B"), ("wan-ti2v", "Wan2.2-TI2V-5B"), ("wan-two", "Wan2.2-T2V-A14B")),
    ],
)
def test_variants_are_recognised_by_config(model_folder, variant, name):
    facts = checked(model_folder(variant))
    assert facts.variant.name == name
    assert facts.weights["transformer"].stored_dtype == "F32"
    assert facts.weights["transformer"].n_bytes == file_of(facts.path, "transformer").stat().st_size


def test_folder_of_other_pipeline_is_refused(folder):
    say(folder / "model_index.json", _class_name="StableVideoDiffusionPipeline")
    with pytest.raises(BadFolder, match=r"holds a Stable.*not a CogVideoXPipeline. It belongs to Stable Video Diff"):
        inspect(folder, COGVIDEOX)


@pytest.mark.parametrize("variant", ["2b", "cogview3", "svd"])
def test_fields_missing_in_vae_config_have_defaults_of_class(copy, variant):
    """These numbers are first needed after sampling, which is late to find one missing."""
    folder = copy(variant)
    file = folder / "vae" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    removed = ("scaling_factor", "temporal_compression_ratio", "force_upcast")
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}), encoding="utf-8")
    model = checked(folder)
    assert model.vae_config["scaling_factor"] in (1.15258426, 0.18215)
    assert model.vae_config.get("temporal_compression_ratio") == (4 if variant == "2b" else None)
    loaded = model.component("vae", torch.float32)
    known = {key for key in config if not key.startswith("_")}
    assert {key: loaded.config[key] for key in known} == {key: model.vae_config[key] for key in known}


def test_list_folders_finds_models_under_unique_names(folder, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "deep" / "er" / "two")
    other = tmp_path / "other"
    shutil.copytree(folder, other / "model")
    found = list_folders([tmp_path, other, tmp_path / "absent"])
    assert list(found) == ["deep/er/two", "model", "other/model"]
    assert found["model"] == folder


def test_circular_links_are_searched_once(folder, tmp_path, monkeypatch):
    """A thousand links, three levels deep, are 1e9 paths. A folder keeps its own name if a link leads to it."""
    root = tmp_path / "root"
    shutil.copytree(folder, root / "real" / "model")
    (root / "a link").symlink_to(root / "real")
    (root / "linked").symlink_to(folder)
    for number in range(1000):
        (root / "real" / f"back {number}").symlink_to(root)
    (root / "lost").symlink_to(tmp_path / "absent")
    (root / "broken").mkdir()
    (root / "broken" / "model_index.json").symlink_to(tmp_path / "absent")
    read = []
    for name in ("listdir", "scandir"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, original=original: read.append(path) or original(path))
    with no_hang("a folder with links that lead back"):
        assert list(list_folders([root])) == ["linked", "real/model"]
    assert len(read) < 10


def test_fingerprint_changes_with_the_files(folder):
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    os.utime(folder / "vae" / "config.json", ns=(1, 1))
    assert fingerprint(folder) != before


def test_fingerprint_changes_with_a_file_of_the_same_size_and_time(folder):
    file = folder / "model_index.json"
    before, lora, stat = fingerprint(folder), Lora(file, 1.0), file.stat()
    key = lora.key
    file.write_text(file.read_text()[::-1])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns and file.stat().st_size == stat.st_size
    assert fingerprint(folder) != before and lora.key != key


def test_fingerprint_of_link_is_that_of_its_target(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert fingerprint(tmp_path / "link") == fingerprint(folder) != fingerprint(folder.parent)


def test_fingerprint_changes_with_the_files_of_a_linked_component(folder, tmp_path):
    """As when two models share a text encoder. Links may be circular, too."""
    elsewhere = (folder / "text_encoder").rename(tmp_path / "t5")
    links = {folder / "text_encoder": elsewhere, elsewhere / "model": folder, folder / "gone": tmp_path / "nowhere"}
    for link, target in (links | {folder / "another": folder / "vae"}).items():
        link.symlink_to(target, target_is_directory=True)
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    os.utime(elsewhere / "config.json", ns=(1, 1))
    changed = fingerprint(folder)
    (folder / "another").unlink()
    assert len({before, changed, fingerprint(folder)}) == 3


def test_training_dtype_is_taken_from_stored_weights(tmp_path):
    for dtype, trained in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp16")):
        folder = build_cogvideox(tmp_path / str(dtype), dtype=dtype)
        variant = inspect(folder, COGVIDEOX).variant
        assert (variant.name, variant.trained_in) == ("CogVideoX-2B", trained)
        assert variant.leaves_fp16 == (dtype == torch.bfloat16)


def test_difference_from_published_model_is_noted(model_folder):
    (note,) = inspect(model_folder("2b"), COGVIDEOX).notes
    assert note.startswith("unknown variant (num_layers 2 instead of 30")


def test_checkpoint_of_several_dtypes_is_noted_and_loads(folder):
    def halve_attention(tensors):
        tensors |= {key: tensor.half() for key, tensor in tensors.items() if "attn" in key}

    rewrite(folder, "transformer", halve_attention)
    notes = inspect(folder, COGVIDEOX).notes
    assert any(note.startswith("transformer is stored in several dtypes (F") for note in notes)
    loaded = checked(folder).component("transformer", torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
