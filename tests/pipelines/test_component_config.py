"""What the configs of a folder ask for, of its sizes and of the libraries: within bounds, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder
from hostile import checked, say

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
        special_tokens_map_file="of/its/author/special_tokens_map.json",
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
