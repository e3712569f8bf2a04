"""ComfyUI's text encoders multiply in float32, whatever the dtype of their weights: docs/native.md says so."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from native_layouts import sizes
from native_models import random_weights
from torch.overrides import TorchFunctionMode

CLIP = sizes(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2)
T5 = sizes(d_model=64, d_ff=96, d_kv=32, num_heads=2, num_layers=2)
LLM = CLIP | sizes(num_key_value_heads=1)
ENCODERS = {  # name of the tokens and of the sizes → class, or function that makes it; sizes
    "clip_l": ("sd1_clip.SD1ClipModel", CLIP),
    "t5xxl": ("text_encoders.pixart_t5.pixart_te", T5),
    "umt5xxl": ("text_encoders.wan.te", T5),
    "gemma2_2b": ("text_encoders.lumina2.te", LLM),
    "qwen25_3b": ("text_encoders.omnigen2.te", LLM),
}
seen: set[torch.dtype] = set()


class Products(TorchFunctionMode):
    """Record the dtypes of what products get."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention, torch.matmul):
            seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ENCODERS)
def test_text_encoder_with_fp16_weights_multiplies_in_float32(name: str) -> None:
    where, _, made_by = f"comfy.{ENCODERS[name][0]}".rpartition(".")
    make = getattr(import_module(where), made_by)
    make = make if isinstance(make, type) else make()
    encoder = make(device="cpu", dtype=torch.float16, model_options={f"{name}_model_config": dict(ENCODERS[name][1])})
    encoder.load_state_dict(random_weights(encoder, {}))
    encoder.set_clip_options({"execution_device": torch.device("cpu")})
    seen.clear()
    with torch.inference_mode(), Products():
        made = encoder.encode_token_weights({name.removeprefix("clip_"): [[(number, 1.0) for number in range(5, 82)]]})
    assert made[0].isfinite().all() and seen == {torch.float32}
