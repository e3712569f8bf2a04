"""Folders that somebody made to do harm, or that lost something: refused by name, before a weight is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder
from hostile import checked, say
from safetensors.torch import load_file, save_file

WEIGHTED = [
    *[("2b", name) for name in ("text_encoder", "transformer", "vae")],
    *[("cogview4", name) for name in ("text_encoder", "transformer", "vae")],
    *[("wan", name) for name in ("text_encoder", "transformer", "vae")],
    *[("svd", name) for name in ("image_encoder", "unet", "vae")],
]


def file_of(folder: Path, name: str) -> Path:
    (file,) = (folder / name).glob("*.safetensors")
    return file


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    """Change a component's tensors on disk."""
    file = file_of(folder, name)
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def shard(folder: Path, name: str, stem: str, *, change: float = 0, files: tuple[str, ...] = ("a", "b")) -> Path:
    """Write a component's tensors, `change` added, into shards beside what is there. Returns their index."""
    tensors = load_file(file_of(folder, name))
    held = {file: dict(list(tensors.items())[n :: len(files)]) for n, file in enumerate(files)}
    for file, part in held.items():
        save_file({key: tensor + change for key, tensor in part.items()}, folder / name / f"{file}.safetensors")
    listed = {key: f"{file}.safetensors" for file, part in held.items() for key in part}
    index = folder / name / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}), encoding="utf-8")
    return index


# --- what the files hold, and what the component is made of -----------------------------------------------------------


@pytest.mark.parametrize(("variant", "name"), WEIGHTED)
def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(
    copy: Callable[[str], Path], variant: str, name: str
) -> None:
    folder = copy(variant)
    whole = file_of(folder, name).read_bytes()
    key = max(load_file(file_of(folder, name)))
    rewrite(folder, name, lambda tensors: tensors.pop(key))
    with pytest.raises(BadFolder, match=f"'model/{name}': its files lack .*'{key}'.*Download config.json and weights"):
        checked(folder)
    file_of(folder, name).write_bytes(whole)
    rewrite(folder, name, lambda tensors: tensors.update(evil=torch.zeros(3)))
    with pytest.raises(BadFolder, match=f"'model/{name}': its files hold 'evil', which a .* has no place for"):
        checked(folder)
    file_of(folder, name).write_bytes(whole)
    rewrite(folder, name, lambda tensors: tensors.update({key: torch.zeros(7, 3)}))
    with pytest.raises(BadFolder, match=rf"'model/{name}': '{key}' has the shape \[7, 3\], and \[.*\] by config.json"):
        checked(folder)
    file_of(folder, name).write_bytes(whole)
    rewrite(folder, name, lambda tensors: tensors.update({key: tensors[key].to(torch.int8)}))
    with pytest.raises(BadFolder, match=f"'model/{name}': '{key}' is stored as I8, and quantised weights"):
        checked(folder)


def older_t5(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors["decoder.final_layer_norm.weight"] = torch.ones(32)


def encoders_alone(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")


def older_clip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vision_model.embeddings.position_ids"] = torch.arange(257)[None]


def older_vae(tensors: dict[str, torch.Tensor]) -> None:
    for new, old in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
        for key in [key for key in tensors if f"encoder.mid_block.attentions.0.{new}." in key]:
            tensors[key.replace(f".{new}.", f".{old}.")] = tensors.pop(key)


@pytest.mark.parametrize(
    ("variant", "name", "change"),
    [
        ("2b", "text_encoder", older_t5),
        ("2b", "text_encoder", encoders_alone),
        ("svd", "image_encoder", older_clip),
        ("svd", "vae", older_vae),
    ],
)
def test_names_of_older_versions_load_as_they_are_stored(
    copy: Callable[[str], Path], variant: str, name: str, change: Callable[..., None]
) -> None:
    folder = copy(variant)
    before = load_file(file_of(folder, name))
    assert rewrite(folder, name, change).keys() != before.keys()
    loaded = checked(folder).component(name, torch.float32).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_files_replaced_after_the_check_are_not_filled_up_with_random_weights(
    copy: Callable[[str], Path], name: str
) -> None:
    folder = copy("2b")
    model = checked(folder)
    rewrite(folder, name, lambda tensors: tensors.pop(max(tensors)))
    with pytest.raises(BadFolder, match=f"'model/{name}' was loaded without . of its tensors, such as"):
        model.component(name, torch.float32)


# --- which files are read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem", "read"),
    [
        ("transformer", "diffusion_pytorch_model", 1),
        ("vae", "diffusion_pytorch_model", 1),
        ("text_encoder", "model", 0),
    ],
)
def test_where_both_are_there_what_is_checked_is_what_the_library_loads(
    copy: Callable[[str], Path], name: str, stem: str, read: float
) -> None:
    """diffusers takes the index, transformers the single file."""
    folder = copy("2b")
    single = load_file(file_of(folder, name))
    index = shard(folder, name, stem, change=1)
    model = checked(folder)
    loaded = model.component(name, torch.float32).state_dict()
    assert all(torch.equal(loaded[key], tensor + read) for key, tensor in single.items())
    assert {file.name for file in model.weights[name].files} == (
        {"a.safetensors", "b.safetensors"} if read else {f"{stem}.safetensors"}
    )
    (folder / name / f"{stem}.safetensors").unlink()
    assert len(checked(folder).weights[name].files) == 2
    index.unlink()
    with pytest.raises(BadFolder, match=f"holds a.safetensors, b.safetensors, but no {stem}.safetensors. Rename"):
        checked(folder)


@pytest.mark.parametrize(
    "evil",
    [
        *("evil.bin", "evil.pkl", "../vae/diffusion_pytorch_model.safetensors", "/etc/x.safetensors", "..", ""),
        *("a\\b.safetensors", "C:x.safetensors", "x.safetensors.bin", "a\0.safetensors"),
    ],
)
def test_shards_are_plain_safetensors_beside_their_index(copy: Callable[[str], Path], evil: str) -> None:
    folder = copy("2b")
    index = shard(folder, "transformer", "diffusion_pytorch_model", files=("a",))
    (folder / "transformer" / "evil.bin").write_bytes(b"\x80\x04.")
    listed = json.loads(index.read_text())["weight_map"]
    say(index, weight_map={**listed, max(listed): evil})
    with pytest.raises(BadFolder, match=r"index.json' names '.*', which is no safetensors file beside it"):
        checked(folder)


def test_an_index_that_is_of_other_shards(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    index = shard(folder, "transformer", "diffusion_pytorch_model")
    listed = json.loads(index.read_text())["weight_map"]
    key = max(listed)
    say(index, weight_map={**listed, key: next(name for name in listed.values() if name != listed[key])})
    with pytest.raises(BadFolder, match=f"is of other files than those beside it: '{key}' is not in [ab].safetensors"):
        checked(folder)
    say(index, weight_map={name: file for name, file in listed.items() if name != key})
    with pytest.raises(BadFolder, match=f"its files lack '{key}'"):
        checked(folder)
    say(index, weight_map=listed)
    shutil.copy(folder / "transformer" / "a.safetensors", folder / "transformer" / "b.safetensors")
    with pytest.raises(BadFolder, match="lies in 2 of them"):
        checked(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_files_that_transformers_would_take_instead(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("2b")
    (folder / "text_encoder" / name).write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(BadFolder, match=f"'model/text_encoder' holds {name}, which would have transformers load"):
        checked(folder)


def test_the_links_of_the_hubs_cache_and_of_people_are_followed(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """What a link leads to is checked as any file is."""
    folder = copy("2b")
    storage = tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / ("0" * 40)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link, blob = snapshot / file.relative_to(folder), storage / "blobs" / f"{number:064}"
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert checked(snapshot).component("vae", torch.float32) is not None
    weights = file_of(folder, "transformer")
    shutil.move(weights, elsewhere := tmp_path / "on-another-disk")
    weights.symlink_to(elsewhere)
    assert checked(folder).component("transformer", torch.float32) is not None
    elsewhere.write_bytes(b"pickled")
    with pytest.raises(BadFolder, match="is not a whole safetensors file"):
        checked(folder)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    for file in ("model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"):
        whole = (folder / file).read_bytes()
        (folder / file).unlink()
        os.mkfifo(folder / file)
        with pytest.raises(BadFolder):
            checked(folder)
        (folder / file).unlink()
        (folder / file).write_bytes(whole)
