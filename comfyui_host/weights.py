"""Where ComfyUI moves weights and casts them, which a rerun in fp32 leaves as it is; and how it is had to do so anew.

A layer's weights may be on the host, in a file, or bytes in a buffer that a stream or dynamic VRAM fills as the layer
runs. What brings them views those bytes in the dtype that they are stored in, casts them to the dtype of the layer's
input, float32 in a rerun, and adds LoRAs in that. Computing begins with what the layer is then given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..precision.shared import SharedSetting
from ..precision.upcast import HALF_DTYPES, OneOperation

_MOVES = {
    "comfy.ops": (
        "cast_bias_weight",  # a layer's, when it runs
        "cast_modules_with_vbar",  # a block's, ahead of it, with dynamic VRAM
    ),
    "comfy.model_management": ("load_models_gpu",),  # a whole model's: a patch may load one of its own
}


@contextmanager
def weights_as_stored() -> Generator[None]:
    """Inside, whatever brings a weight to where it is used sees the dtype that it has, also in a rerun."""
    with _MOVES_ARE_OPERATIONS.held():
        yield


def loaded_anew(model: torch.nn.Module) -> bool:
    """Whether a model that is on the card was taken off it and loaded once more: from the weights on the host or in the
    file, with LoRAs patched in again. What the card had, and copies of it in pinned memory, may have been stale.

    model: ComfyUI's BaseModel. Not where others loaded it, or while it runs compiled, which hides its layers' names.
    """
    management: Any = sys.modules["comfy.model_management"]
    every = management.current_loaded_models
    loaded = next((each for each in every if each.model is not None and each.model.model is model), None)
    if loaded is None or any(hasattr(part, "_orig_mod") for part in model.modules()):
        return False
    patcher = loaded.model
    hooks = getattr(patcher, "current_hooks", None)
    in_part = getattr(model, "model_lowvram", False)
    room = max(patcher.loaded_size(), 1) if in_part else 0  # bytes; 0: all of it
    every.remove(loaded)
    loaded.model_unload()
    loaded.model_load(room)
    every.insert(0, loaded)
    if hooks is not None:
        patcher.patch_hooks(hooks)
    return True


def _as_operations() -> Callable[[], None]:
    with ExitStack() as undo:
        for name, functions in _MOVES.items():
            module = sys.modules.get(name)
            for function in functions:
                original = getattr(module, function, None)
                if original is not None:  # older ComfyUIs have some of them
                    undo.callback(setattr, module, function, original)
                    setattr(module, function, OneOperation(original, _FOR_PRODUCTS.get(function)))
        return undo.pop_all().close


def _cast_for_products(
    products: torch.dtype,
    layer: Any,
    input: Any = None,  # noqa: A002 - as ComfyUI names it
    dtype: torch.dtype | None = None,
    device: Any = None,
    bias_dtype: torch.dtype | None = None,
    **more: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `cast_bias_weight` such that it gives a product's weight in the dtype of products, or in one that
    holds more; and all else in float32, as the layer's input is."""
    weight = getattr(layer, "weight", None)
    multiplies = isinstance(weight, torch.Tensor) and weight.ndim > 1 and not isinstance(layer, torch.nn.Embedding)
    if dtype is None and multiplies:
        dtype, bias_dtype = _cast_to(products, layer), torch.float32
    elif dtype in HALF_DTYPES:
        dtype = torch.float32
    return (layer, input), {"dtype": dtype, "device": device, "bias_dtype": bias_dtype, **more}


def _cast_to(products: torch.dtype, layer: Any) -> torch.dtype:
    """fp16 does not hold all that bf16 and fp32 do: such a weight comes as it is, and is scaled before it is cast. What
    is patched on the way is not rounded to bf16."""
    stored: torch.dtype = layer.weight.dtype
    if products is not torch.float16 or stored not in (torch.bfloat16, torch.float32):
        return products
    patched = getattr(layer, "weight_function", None) or getattr(layer, "weight_lowvram_function", None)
    return torch.float32 if patched else stored


_FOR_PRODUCTS = {"cast_bias_weight": _cast_for_products}
_MOVES_ARE_OPERATIONS = SharedSetting(_as_operations)
