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
from comfyui_onediff_guard.pipelines.folder import family_of, inspect
from safetensors.torch import load_file, save_file

WEIGHTED = [
    *[("2b", name) for name in ("text_encoder", "transformer", "vae")],
    *[("cogview4", name) for name in ("text_encoder", "transformer", "vae")],
    *[("svd", name) for name in ("image_encoder", "unet", "vae")],
]


@pytest.fixture
def copy(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda variant: shutil.copytree(model_folder(variant), tmp_path / "model")


def checked(folder: Path) -> Any:
    return inspect(folder, family_of(folder))


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


def say(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


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
            inspect(folder, family_of(folder))
        (folder / file).unlink()
        (folder / file).write_bytes(whole)


# --- what a config asks for -------------------------------------------------------------------------------------------

HOOKS: list[tuple[str, Any]] = [
    ("_attn_implementation", "someone/kernel"),
    ("attn_implementation", "someone/kernel:fast"),
    ("attn_implementation", {"": "someone/kernel"}),
    ("_attn_implementation_internal", "paged|someone/kernel"),
    ("attn_implementation", "flash_attention_2"),
    ("experts_implementation", "someone/kernel"),
    ("_experts_implementation", "grouped_mm"),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("compression_config", {"format": "dense"}),
    ("kernel_config", {"RMSNorm": "someone/kernel:RMSNorm"}),
    ("use_kernels", True),
    ("fusion_config", {"patch_embeddings": True}),
    ("transformers_weights", "other.safetensors"),
    ("_use_default_values", ["num_layers"]),
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
@pytest.mark.parametrize(("field", "value"), HOOKS)
def test_what_reaches_beyond_the_folder_is_refused_by_name(
    copy: Callable[[str], Path], name: str, field: str, value: Any, nested: bool
) -> None:
    folder = copy("2b")
    say(folder / name / "config.json", **({"text_config": [{field: value}]} if nested else {field: value}))
    place = f"text_config.{field}" if nested else field
    with pytest.raises(BadFolder, match=f"model/{name}/config.json' cannot be used: its '{place}' is .*refused"):
        checked(folder)


@pytest.mark.parametrize("name", ["text_encoder", "transformer"])
@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation_autoset": True, "attn_implementation": None, "_attn_implementation": "eager"},
        {"_attn_implementation": "sdpa", "quantization_config": None, "use_kernels": False, "per_layer_config": {}},
        {"auto_map": {"AutoModel": "model.Evil"}, "architectures": ["Evil"], "torch_dtype": "evil"},
        {"_commit_hash": "x", "model_type": "evil", "name_or_path": "/etc", "tp_plan": "evil", "made_up": [{"x": {}}]},
    ],
)  # fmt: skip
def test_what_is_harmless_or_reaches_no_library_loads_as_before(
    copy: Callable[[str], Path], name: str, fields: dict[str, Any]
) -> None:
    folder = copy("2b")
    expected = checked(folder).component(name, torch.float32).state_dict()
    say(folder / name / "config.json", **fields)
    module = checked(folder).component(name, torch.float32)
    assert type(module).__name__ in ("T5EncoderModel", "CogVideoXTransformer3DModel")
    found = module.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_transformers_gets_the_fields_that_were_checked_and_no_other(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    say(folder / "text_encoder" / "config.json", made_up="someone/kernel", problem_type="x")
    config: Any = checked(folder).component("text_encoder", torch.float32).config
    assert not hasattr(config, "made_up") and config.problem_type is None
    assert (config.d_model, config.feed_forward_proj, config.dense_act_fn) == (32, "gated-gelu", "gelu_new")


@pytest.mark.parametrize(
    ("variant", "name", "fields", "said"),
    [
        ("2b", "transformer", {"num_layers": 10**9}, "num_layers is 1000000000: .*less than or equal to 256"),
        ("2b", "transformer", {"num_layers": "<img src=x>"}, "num_layers is <img src=x>: .*valid integer"),
        ("2b", "transformer", {"sample_height": "8"}, "sample_height is 8: .*valid integer"),
        ("2b", "transformer", {"num_attention_heads": -4}, "num_attention_heads is -4: .*greater than or equal to 1"),
        ("2b", "transformer", {"norm_eps": 1e-400}, "norm_eps is 0.0: .*greater than 0"),
        ("2b", "transformer", {"_class_name": "UNet2DModel"}, "its '_class_name' is UNet2DModel, and model_index.json"),
        ("2b", "text_encoder", {"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ("2b", "text_encoder", {"num_layers": True}, "num_layers is True"),
        ("2b", "text_encoder", {"feed_forward_proj": "a" * 99}, "feed_forward_proj is aaa"),
        ("2b", "vae", {"block_out_channels": [8] * 99}, "block_out_channels is a list of 99"),
        ("2b", "vae", {"layers_per_block": 10**6}, "layers_per_block is 1000000"),
        ("2b", "vae", {"scaling_factor": 0.0}, "scaling_factor is 0.0: .*greater than 0"),
        ("2b", "vae", {"temporal_compression_ratio": 0.5}, "temporal_compression_ratio is 0.5: .*or equal to 1"),
        ("cogview4", "text_encoder", {"rope_parameters": {"factor": "a b"}}, "rope_parameters"),
        ("svd", "unet", {"transformer_layers_per_block": 10**6}, "transformer_layers_per_block"),
        ("svd", "image_encoder", {"image_size": 10**6}, "image_size is 1000000"),
    ],
)  # fmt: skip
def test_numbers_out_of_sense_are_refused_before_anything_is_built(
    copy: Callable[[str], Path], variant: str, name: str, fields: dict[str, Any], said: str
) -> None:
    folder = copy(variant)
    say(folder / name / "config.json", **fields)
    with pytest.raises(BadFolder, match=f"model/{name}/config.json' cannot be used: {said}"):
        checked(folder)


@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "transformer/config.json"])
def test_a_config_of_more_fields_than_any_class_has(copy: Callable[[str], Path], file: str) -> None:
    """What of them no class knows stands in the report: some of their names."""
    folder = copy("2b")
    say(folder / file, **{f"field_{n}": n for n in range(1000)})
    found = checked(folder)
    assert len("".join(found.unknown_fields("vae") + found.unknown_fields("transformer"))) < 500
    say(folder / file, **{f"field_{n}": n for n in range(100_000)})
    with pytest.raises(BadFolder, match=f"model/{file}' cannot be read as JSON: it is larger than 1,048,576 bytes"):
        checked(folder)


def test_positions_that_no_memory_holds(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    say(folder / "transformer" / "config.json", sample_height=4096, sample_width=4096, sample_frames=4096)
    with pytest.raises(
        BadFolder, match=r"'model/transformer': the sizes in its config.json take [\d,]+ GB for positions"
    ):
        checked(folder)


@pytest.mark.parametrize(
    ("variant", "file", "fields", "said"),
    [
        ("2b", "tokenizer/tokenizer_config.json", {"vocab_file": "/etc/passwd"}, "'vocab_file' is /etc/passwd"),
        ("2b", "tokenizer/tokenizer_config.json", {"tokenizer_file": "../x.json"}, "'tokenizer_file' is ../x.json"),
        ("2b", "tokenizer/tokenizer_config.json", {"sp_model_kwargs": {"model_file": "/x"}}, "'sp_model_kwargs' is"),
        ("2b", "tokenizer/tokenizer_config.json", {"init_inputs": ["/etc/passwd"]}, "'init_inputs' is"),
        ("2b", "tokenizer/tokenizer_config.json", {"extra_ids": 10**9}, "extra_ids is 1000000000"),
        ("2b", "tokenizer/special_tokens_map.json", {"vocab_file": "/etc/passwd"}, "'vocab_file' is /etc/passwd"),
        ("2b", "scheduler/scheduler_config.json", {"num_train_timesteps": 10**9}, "num_train_timesteps is 1000000000"),
        ("2b", "scheduler/scheduler_config.json", {"beta_start": "x"}, "beta_start is x"),
        ("svd", "feature_extractor/preprocessor_config.json", {"crop_size": {"height": 10**9}}, "crop_size"),
    ],
)  # fmt: skip
def test_what_has_no_weights_is_checked_too(
    copy: Callable[[str], Path], variant: str, file: str, fields: dict[str, Any], said: str
) -> None:
    folder = copy(variant)
    say(folder / file, **fields)
    with pytest.raises(BadFolder, match=f"model/{file}' cannot be used: .*{said}"):
        checked(folder)


def test_a_tokenizer_as_published_with_its_authors_paths_loads(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    say(
        folder / "tokenizer" / "tokenizer_config.json",
        special_tokens_map_file="/home/author/.cache/special_tokens_map.json",
        sp_model_kwargs={},
        tokenizer_file=None,
        model_max_length=10**30,
        extra_ids=100,
    )
    assert checked(folder).unweighted("tokenizer")("a cat").input_ids


def test_a_vocabulary_larger_than_any_is_not_read(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    os.truncate(folder / "tokenizer" / "spiece.model", 2**30)
    with pytest.raises(BadFolder, match=r"'model/tokenizer/spiece.model' has 1,073,741,824 bytes, and 67,108,864"):
        checked(folder)
