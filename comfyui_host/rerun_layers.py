"""ComfyUI's layers in an fp32 rerun: quantised layers multiply in fp32, and weights are loaded in their stored dtype.

A layer that rounds its input to fp8, int8 or fp4 also has quantised weights. The rounding is in:
- `comfy.ops.fp8_linear` (--fast fp8_matrix_mult, and checkpoints with scaled fp8 weights, until 2025). If it returns
  None, ComfyUI itself casts the weights to the input's dtype, scales them, and multiplies in that dtype;
- the layers of `comfy.ops.mixed_precision_ops`, whose weights are a tensor class of their own. They do not round if
  their `_full_precision_mm` is set;
- `comfy.ops.linear_input_act`, which fuses an activation and an int8 product, and ignores the layer's switch.

All three are switched for the calling thread only: other threads may use the same layer.

With every layer scaled, `OwnProducts` multiplies by the quantised weights with ComfyUI's own kernels, which accumulate
in int32 or float32, from scaled rows. Where ComfyUI would use no kernel, the weights are dequantised in the cast.

A layer's weights may be on the host, in a file, or bytes in a buffer that a stream or dynamic VRAM fills as the layer
runs. The loading code views those bytes in their stored dtype, casts them to the dtype of the layer's input (float32 in
a rerun), and adds LoRAs in that dtype. The rerun must not change these steps: see `weights_as_stored`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..precision.dtypes import HALF_DTYPES, dtype_name
from ..precision.process_state import SharedSetting
from ..precision.upcast import OneOperation, RerunUnsupported, dequantised, is_quantised
from ..trust.message import Message, shown
from . import host
from .compat import NotInComfyUI, unless_changed

_IN_FULL = "_full_precision_mm"  # ComfyUI's own switch, on each layer that may hold quantised weights


@contextmanager
def products_in_fp32(network: torch.nn.Module) -> Generator[None]:
    """Inside, this thread's layers multiply in their input's dtype by the weights of the checkpoint.

    Raises RerunUnsupported for quantised layers without ComfyUI's switch.
    """
    _refuse_quantised(network)
    before = _here.whole
    try:
        _here.whole = True
        with _WHOLE_PRODUCTS.held():
            yield
    finally:
        _here.whole = before


def rerun_from(network: torch.nn.Module) -> str:
    """Return a line on the weights that a rerun computes from, if they hold less than half precision; else ""."""
    layers, kind = network.modules(), _quantised_kind()
    held = {_held_in(layer, weight, kind) for layer in layers for weight in layer.parameters(recurse=False)}
    stored = " and ".join(sorted(held - {""}))
    return f"the rerun used the stored {stored} weights, and multiplied in fp32" if stored else ""


def _held_in(layer: torch.nn.Module, weight: torch.Tensor, kind: type | tuple[()]) -> str:
    """Return a weight's dtype or quantised format; "" if that is half precision or more."""
    if isinstance(weight, kind):
        return str(getattr(layer, "quant_format", "quantised"))
    return dtype_name(weight.dtype) if weight.is_floating_point() and weight.dtype.itemsize < 2 else ""


def _quantised_kind() -> type | tuple[()]:
    """Return ComfyUI's class of quantised weights; () if it has none."""
    module: Any = sys.modules.get("comfy.quant_ops")
    if module is None and host.in_comfyui():
        host.check_absence("comfy.quant_ops", since=(0, 33))
    return module.QuantizedTensor if module else ()


def _refuse_quantised(network: torch.nn.Module) -> None:
    """Raise RerunUnsupported for a quantised layer without ComfyUI's switch. Embeddings pass: they round no input."""
    kind = _quantised_kind()
    for layer in network.modules() if kind else ():  # runs in each call: without names, a third of the time
        if _IN_FULL in vars(layer) or isinstance(layer, torch.nn.Embedding):
            continue
        for own, weight in layer._parameters.items():
            if isinstance(weight, kind):
                layout = getattr(weight, "_layout_cls", "quantised")
                raise RerunUnsupported(
                    "'{}.{}' is quantised ({}), and its layer ({}) cannot compute in full precision, so an fp32 "
                    "rerun is impossible. Update ComfyUI, remove the node that added this layer, or use a checkpoint "
                    "of this model in fp16, bf16 or plain fp8.",
                    next(name for name, each in network.named_modules() if each is layer),
                    own,
                    layout,
                    type(layer).__name__,
                )


class _Here(threading.local):
    whole = False  # whether this thread multiplies in the input's dtype


_here = _Here()


class _InFull:
    """A descriptor in place of a layer's own `_full_precision_mm`, which it keeps: on in a thread that reruns."""

    def __get__(self, layer: Any, owner: type) -> Any:
        if _IN_FULL not in vars(layer or owner):
            raise AttributeError(_IN_FULL)
        return _here.whole or vars(layer)[_IN_FULL]

    def __set__(self, layer: Any, value: bool) -> None:
        vars(layer)[_IN_FULL] = value


def _make_whole_products() -> Callable[[], None]:
    with ExitStack() as undo:
        _replace(undo, "comfy.ops", "fp8_linear", partial(_in_full, lambda _original, *_, **__: None))
        _replace(undo, "comfy.ops", "linear_input_act", partial(_in_full, _with_unquantised_layer), since=(0, 33))
        if ops := sys.modules.get("comfy.ops"):
            base: Any = ops.CastWeightBiasOp  # of all its layers
            setattr(base, _IN_FULL, _InFull())
            undo.callback(delattr, base, _IN_FULL)
        _plan_no_memory(undo)
        _round_as_trained(undo)
        return undo.pop_all().close


@unless_changed("recomputing apart from ComfyUI's plan for memory", None, kinds=(NotInComfyUI,))
def _plan_no_memory(undo: ExitStack) -> None:
    """Turn Comfy Compiler off in reruns. Since 0.35 it records a network's allocations for later calls, and replays
    blocks that it has captured in CUDA graphs: neither fits what a rerun computes."""
    off = partial(_in_full, lambda _original, *_, **__: False)
    _replace(undo, "comfy.model_prefetch", "malloc_graph_enabled", off, since=(0, 35))


@unless_changed("rounding timesteps in a rerun as in training", None, kinds=(NotInComfyUI,))
def _round_as_trained(undo: ExitStack) -> None:
    """Keep MageFlow's rounding of timesteps and their frequencies to bf16, as it was trained; ComfyUI rounds them in
    any precision (since 0.33). The rounding is one operation, so that a rerun does not make it float32. The layers
    behind it compute as all others do."""

    def rounded(original: Any, part: Any, timestep: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        def table(timestep: torch.Tensor) -> torch.Tensor:
            own = _With(part, timestep_embedder=lambda frequencies: frequencies)  # without the layers behind it
            return original(own, timestep.bfloat16(), timestep)

        return part.timestep_embedder(OneOperation(table)(timestep))

    of, make = "MageTimestepProjEmbeddings", partial(_in_full, rounded)
    _replace(undo, "comfy.ldm.mage_flow.model", "forward", make, since=(0, 33), of_class=of)


def _in_full(made_in_full: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ComfyUI function that is `made_in_full(original, ...)` in threads that rerun, else the original."""

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return made_in_full(original, *args, **kwargs) if _here.whole else original(*args, **kwargs)

    return replaced


def _replace(
    undo: ExitStack,
    module: str,
    name: str,
    make: Callable[[Any], Any],
    since: tuple[int, ...] = (0, 3),
    of_class: str = "",
) -> None:
    """Replace a function, or a class's method, by `make(original)`.

    since: the first release that has it. Raises NotInComfyUI if this or a later release lacks it.
    """
    owner: Any = sys.modules.get(module)
    owner = getattr(owner, of_class, None) if of_class else owner
    original = getattr(owner, name, None)
    if original is not None:
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, make(original))
    elif host.in_comfyui():
        host.check_absence(".".join(filter(None, (module, of_class, name))), since)


class _With:
    """An object of ComfyUI's as its own functions see it, with other attributes than it has."""

    def __init__(self, of: Any, **attributes: Any):
        self._of = of
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._of(*args, **kwargs)


def _with_unquantised_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `linear_input_act`, whatever else its version takes. It asks a weight whether it is quantised; its way for
    layers that are not calls the layer, which then multiplies in full."""
    if args:
        return original(_With(args[0], weight=None), *args[1:], **kwargs)
    return original(**{**kwargs, "linear": _With(kwargs["linear"], weight=None)})


_WHOLE_PRODUCTS = SharedSetting(_make_whole_products)


@contextmanager
def weights_as_stored() -> Generator[None]:
    """Inside, code that loads a weight sees the weight's stored dtype, also in a rerun."""
    with _MOVES_ARE_OPERATIONS.held():
        yield


@unless_changed("reloading weights that may be stale", False)
def loaded_anew(model: torch.nn.Module) -> bool:
    """Reload a model that is on the device, from the weights on the host or in the file, with LoRAs patched in again:
    weights on the device, and their copies in pinned memory, may be stale. Returns whether it was reloaded.

    model: ComfyUI's BaseModel. Not reloaded if others loaded it, or if it is compiled, which hides its layers' names.
    """
    management: Any = sys.modules["comfy.model_management"]
    every, of = management.current_loaded_models, vars(model)  # shared by views of the model
    loaded = next(
        (each for each in every if each.model is not None and getattr(each.model.model, "__dict__", None) is of), None
    )
    if loaded is None or any(hasattr(part, "_orig_mod") for part in model.modules()):
        return False
    patcher = loaded.model
    hooks = patcher.current_hooks
    in_part = getattr(model, "model_lowvram", False)
    room = max(patcher.loaded_size(), 1) if in_part else 0  # bytes; 0: all of it
    unload, load = loaded.model_unload, loaded.model_load
    patch_hooks = patcher.patch_hooks if hooks is not None else None
    every.remove(loaded)
    try:
        unload()
        load(room)
        every.insert(0, loaded)
        if patch_hooks:
            patch_hooks(hooks)
    except BaseException as error:
        error.lost = "weights"  # pyright: ignore[reportAttributeAccessIssue] - LoRAs may be in none or in some
        raise
    return True


def _as_operations() -> Callable[[], None]:
    with ExitStack() as undo:
        for module, name, for_products, since in _MOVES:
            _replace(undo, module, name, partial(OneOperation, for_products=for_products), since)
        _replace(undo, "comfy.ops", "cast_bias_weight", partial(_in_full, _patched_table_in_fp32))
        return undo.pop_all().close


def _patched_table_in_fp32(original: Callable[..., Any], layer: Any, *args: Any, **more: Any) -> Any:
    """Call `cast_bias_weight`; in float32 for a patched embedding. ComfyUI names no dtype for one in half precision,
    and would round the patch."""
    if isinstance(layer, torch.nn.Embedding) and not args and more.get("dtype") is None and _patched(layer):
        more["dtype"] = torch.float32
    return original(layer, *args, **more)


def _patched(layer: Any) -> bool:
    """Return whether a layer's weight is patched as the layer runs."""
    return bool(getattr(layer, "weight_function", None) or getattr(layer, "weight_lowvram_function", None))


def _cast_for_products(
    products: torch.dtype,
    layer: Any,
    input: Any = None,  # noqa: A002 - as ComfyUI names it
    dtype: torch.dtype | None = None,
    device: Any = None,
    bias_dtype: torch.dtype | None = None,
    *further: Any,
    **more: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with which `cast_bias_weight` casts a product's weight to the dtype of products or a wider one,
    and everything else to float32, the dtype of the layer's input."""
    weight = getattr(layer, "weight", None)
    multiplies = isinstance(weight, torch.Tensor) and weight.ndim > 1 and not isinstance(layer, torch.nn.Embedding)
    if dtype is None and multiplies:
        dtype, bias_dtype = _cast_to(products, layer), torch.float32
    elif dtype in HALF_DTYPES or (dtype is None and getattr(input, "dtype", None) in HALF_DTYPES):
        dtype, bias_dtype = torch.float32, torch.float32
    if further:
        return (layer, input, dtype, device, bias_dtype, *further), more
    return (layer, input), {"dtype": dtype, "device": device, "bias_dtype": bias_dtype, **more}


def _cast_to(products: torch.dtype, layer: Any) -> torch.dtype:
    """Return the dtype for a product's weight. For products in fp16 a bf16 or fp32 weight keeps its dtype, since it is
    scaled before its cast; if patched it is float32, so that the patch is not rounded to bf16. A quantised weight stays
    quantised; it is float32 if it is patched, or if its checkpoint or this device has its layer multiply in full."""
    stored: torch.dtype = layer.weight.dtype
    patched = _patched(layer)
    if is_quantised(layer.weight) and layer.weight.ndim == 2:
        return torch.float32 if patched or vars(layer).get(_IN_FULL) else stored
    if products is not torch.float16 or stored not in (torch.bfloat16, torch.float32):
        return products
    return torch.float32 if patched else stored


_MOVES = (
    ("comfy.ops", "cast_bias_weight", _cast_for_products, (0, 3)),  # one layer's weights, as it runs
    ("comfy.ops", "cast_modules_with_vbar", None, (0, 33)),  # a block's, ahead of it, with dynamic VRAM
    ("comfy.model_management", "load_models_gpu", None, (0, 3)),  # a whole model's: a patch may load one of its own
)
_MOVES_ARE_OPERATIONS = SharedSetting(_as_operations)


class OwnProducts:
    """Products of quantised weights by ComfyUI's own kernels.

    without: layout of weights that has no kernel here → the reason.
    """

    def __init__(self) -> None:
        self.without: dict[str, str] = {}

    def kernel_of(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a weight's kernel, or None (precision.scaled_products.KernelOf)."""
        layout = getattr(weight, "_layout_cls", type(weight).__name__)
        if layout not in _ROWS:
            self.without.setdefault(layout, Message("no kernel is known"))
        dtype, rows_in = _ROWS.get(layout, (torch.float32, ""))
        if layout in self.without or (rows_in and any(size % 16 for size in weight.shape)):
            return None

        def product(rows: torch.Tensor) -> torch.Tensor:
            try:
                kind: Any = type(weight)
                rounded = kind.from_float(rows.to(dtype), rows_in) if rows_in else rows
                of = weight.float() if layout == _AS_ITS_WEIGHT else weight
                return torch.nn.functional.linear(rounded, of).float()
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) or host.is_interrupt(error):
                    raise
                self.without[layout] = f"{type(error).__name__}: {shown(str(error), 200)}"
                return torch.nn.functional.linear(rows, dequantised(weight))

        return product


_AS_ITS_WEIGHT = "AsymW4A8Int8Layout"  # its output has the weight's dtype, other kernels' the rows' dtype
# layout of weights → its kernel's dtype, and the layout of rows; "" if the kernel quantises them itself
_ROWS = {
    "TensorWiseINT8Layout": (torch.float32, ""),
    "TensorCoreConvRotW4A4Layout": (torch.float32, ""),
    _AS_ITS_WEIGHT: (torch.float32, ""),
    "TensorCoreFP8Layout": (torch.float32, "TensorCoreFP8Layout"),
    "TensorCoreFP8E4M3Layout": (torch.float32, "TensorCoreFP8E4M3Layout"),
    "TensorCoreFP8E5M2Layout": (torch.float32, "TensorCoreFP8E4M3Layout"),  # no card multiplies e5m2 by e5m2
    "TensorCoreNVFP4Layout": (torch.bfloat16, "TensorCoreNVFP4Layout"),  # its kernel returns half precision only
    "TensorCoreMXFP8Layout": (torch.bfloat16, "TensorCoreMXFP8Layout"),
}
