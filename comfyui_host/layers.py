"""ComfyUI's layers in an fp32 rerun: quantised ones multiply in fp32, and weights move in the dtype that they have.

A layer that rounds its input to fp8, int8 or fp4 holds its weights in few bits too. Where it rounds:
- `comfy.ops.fp8_linear` (--fast fp8_matrix_mult, and checkpoints with scaled fp8 weights, until 2025): where that gives
  None, ComfyUI itself casts the weights to the input's dtype, scales them, and multiplies in that;
- the layers of `comfy.ops.mixed_precision_ops`, whose weights are a tensor class of their own: not where their
  `_full_precision_mm` says so;
- `comfy.ops.linear_input_act`, which makes one of an activation and an int8 product, and does not ask that layer.

All of them are told of the thread that asks: others may be using the same layer.

With every layer scaled, `OwnProducts` then multiplies by the weights as they are quantised: by ComfyUI's own kernels,
which add in int32 or float32, of rows that it scales. Where ComfyUI itself would not, it dequantises as it casts.

A layer's weights may be on the host, in a file, or bytes in a buffer that a stream or dynamic VRAM fills as the layer
runs. What brings them views those bytes in the dtype that they are stored in, casts them to the dtype of the layer's
input, float32 in a rerun, and adds LoRAs in that. Computing begins with what the layer is then given.
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
from ..precision.shared import SharedSetting
from ..precision.upcast import OneOperation, RerunUnsupported, dequantised, is_quantised
from ..trust.message import Message, shown
from . import host
from .compat import NotInComfyUI, unless_changed

_IN_FULL = "_full_precision_mm"  # ComfyUI's own switch, on each layer that may hold quantised weights


@contextmanager
def products_in_fp32(network: torch.nn.Module) -> Generator[None]:
    """Inside, in this thread, layers multiply in their input's dtype by the weights that the checkpoint holds.

    Raises RerunUnsupported for layers that quantise in a way of their own.
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
    """What a rerun in fp32 computes from, where the weights hold less than half precision; "" where they do not."""
    layers, kind = network.modules(), _quantised_kind()
    held = {_held_in(layer, weight, kind) for layer in layers for weight in layer.parameters(recurse=False)}
    stored = " and ".join(sorted(held - {""}))
    return f"rerun from the {stored} weights as they are stored, with products in fp32" if stored else ""


def _held_in(layer: torch.nn.Module, weight: torch.Tensor, kind: type | tuple[()]) -> str:
    """Its dtype or quantised format; "" where that is half precision or more."""
    if isinstance(weight, kind):
        return str(getattr(layer, "quant_format", "quantised"))
    return dtype_name(weight.dtype) if weight.is_floating_point() and weight.dtype.itemsize < 2 else ""


def _quantised_kind() -> type | tuple[()]:
    """ComfyUI's class of quantised weights; that of nothing in one that has none."""
    module: Any = sys.modules.get("comfy.quant_ops")
    if module is None and host.in_comfyui():
        host.check_absence("comfy.quant_ops", since=(0, 33))
    return module.QuantizedTensor if module else ()


def _refuse_quantised(network: torch.nn.Module) -> None:
    """Not those that have ComfyUI's switch, and not a table that is looked up: it rounds nothing that goes in."""
    kind = _quantised_kind()
    for layer in network.modules() if kind else ():  # each call asks: without names, that takes a third of the time
        if _IN_FULL in vars(layer) or isinstance(layer, torch.nn.Embedding):
            continue
        for own, weight in layer._parameters.items():
            if isinstance(weight, kind):
                layout = getattr(weight, "_layout_cls", "quantised")
                raise RerunUnsupported(
                    "'{}.{}' is quantised ({}), and its layer, a {}, has no switch for products in full precision: a "
                    "rerun would not be fp32. Update ComfyUI, take off the node that put this layer in, or use a "
                    "checkpoint of this model in fp16, bf16 or plain fp8.",
                    next(name for name, each in network.named_modules() if each is layer),
                    own,
                    layout,
                    type(layer).__name__,
                )


class _Here(threading.local):
    whole = False  # products are to be made in the input's dtype, in this thread


_here = _Here()


class _InFull:
    """This stands in place of a layer's own `_full_precision_mm`, which stays there: on in a thread that reruns."""

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
    """Comfy Compiler (since 0.35) records what a network allocates, and has later calls allocate the same; and it
    replays blocks that it has captured in CUDA graphs. Neither may meet what we compute otherwise."""
    off = partial(_in_full, lambda _original, *_, **__: False)
    _replace(undo, "comfy.model_prefetch", "malloc_graph_enabled", off, since=(0, 35))


@unless_changed("rounding timesteps in a rerun as a model was trained on them", None, kinds=(NotInComfyUI,))
def _round_as_trained(undo: ExitStack) -> None:
    """MageFlow was trained with timesteps and their frequencies in bf16, and ComfyUI rounds them to it in any precision
    (since 0.33). What would make them float32 must not see that: it is one operation. The layers behind compute as all
    others do."""

    def rounded(original: Any, part: Any, timestep: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        def table(timestep: torch.Tensor) -> torch.Tensor:
            own = _With(part, timestep_embedder=lambda frequencies: frequencies)  # without the layers behind it
            return original(own, timestep.bfloat16(), timestep)

        return part.timestep_embedder(OneOperation(table)(timestep))

    of, make = "MageTimestepProjEmbeddings", partial(_in_full, rounded)
    _replace(undo, "comfy.ldm.mage_flow.model", "forward", make, since=(0, 33), of_class=of)


def _in_full(made_in_full: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ComfyUI's, for which threads that rerun have `made_in_full(original, ...)`."""

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
    """Put what `make` makes of a function, or of a class's method, in its place.

    since: the first release that has it; raises NotInComfyUI where one from then on lacks it.
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
    """Inside, whatever brings a weight to where it is used sees the dtype that it has, also in a rerun."""
    with _MOVES_ARE_OPERATIONS.held():
        yield


@unless_changed("loading weights anew that may be stale", False)
def loaded_anew(model: torch.nn.Module) -> bool:
    """Whether a model that is on the card was taken off it and loaded once more: from the weights on the host or in the
    file, with LoRAs patched in again. What the card had, and copies of it in pinned memory, may have been stale.

    model: ComfyUI's BaseModel. Not where others loaded it, or while it runs compiled, which hides its layers' names.
    """
    management: Any = sys.modules["comfy.model_management"]
    every, of = management.current_loaded_models, vars(model)  # which a view of the model shares with it
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
    """Call `cast_bias_weight`. For a table that is looked up ComfyUI names no dtype, where it is in half precision, and
    so rounds what it adds to it."""
    if isinstance(layer, torch.nn.Embedding) and not args and more.get("dtype") is None and _patched(layer):
        more["dtype"] = torch.float32
    return original(layer, *args, **more)


def _patched(layer: Any) -> bool:
    """Whether its weight is patched as it runs."""
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
    """Arguments of `cast_bias_weight` such that it gives a product's weight in the dtype of products, or in one that
    holds more; and all else in float32, as the layer's input is."""
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
    """fp16 does not hold all that bf16 and fp32 do: such a weight comes as it is, and is scaled before it is cast. What
    is patched on the way is not rounded to bf16. A quantised one comes dequantised where it is patched so, and where
    its checkpoint or this card has its layer multiply in full."""
    stored: torch.dtype = layer.weight.dtype
    patched = _patched(layer)
    if is_quantised(layer.weight) and layer.weight.ndim == 2:
        return torch.float32 if patched or vars(layer).get(_IN_FULL) else stored
    if products is not torch.float16 or stored not in (torch.bfloat16, torch.float32):
        return products
    return torch.float32 if patched else stored


_MOVES = (
    ("comfy.ops", "cast_bias_weight", _cast_for_products, (0, 3)),  # a layer's, when it runs
    ("comfy.ops", "cast_modules_with_vbar", None, (0, 33)),  # a block's, ahead of it, with dynamic VRAM
    ("comfy.model_management", "load_models_gpu", None, (0, 3)),  # a whole model's: a patch may load one of its own
)
_MOVES_ARE_OPERATIONS = SharedSetting(_as_operations)


class OwnProducts:
    """Products of quantised weights by ComfyUI's own kernels.

    without: the layouts that have none here, and why.
    """

    def __init__(self) -> None:
        self.without: dict[str, str] = {}

    def kernel_of(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """As precision.scaled_products has it."""
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


_AS_ITS_WEIGHT = "AsymW4A8Int8Layout"  # its kernel gives what the weight says that it is, others what their rows are
# by layout of weights: what its kernel takes and gives; the layout of rows, "" where the kernel rounds them itself
_ROWS = {
    "TensorWiseINT8Layout": (torch.float32, ""),
    "TensorCoreConvRotW4A4Layout": (torch.float32, ""),
    _AS_ITS_WEIGHT: (torch.float32, ""),
    "TensorCoreFP8Layout": (torch.float32, "TensorCoreFP8Layout"),
    "TensorCoreFP8E4M3Layout": (torch.float32, "TensorCoreFP8E4M3Layout"),
    "TensorCoreFP8E5M2Layout": (torch.float32, "TensorCoreFP8E4M3Layout"),  # no card multiplies e5m2 by e5m2
    "TensorCoreNVFP4Layout": (torch.bfloat16, "TensorCoreNVFP4Layout"),  # its kernel gives half precision alone
    "TensorCoreMXFP8Layout": (torch.bfloat16, "TensorCoreMXFP8Layout"),
}
