"""Tables of PyTorch's functions: which are safe on fp16 tensors whose values have room, and with which arguments.

A safe function makes no value much larger or smaller, and turns no infinite or NaN value into a finite one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .overflow_detection import OPERATORS
from .upcast import ALIASING, METADATA, OneOperation, is_quantised

FP16 = torch.float16
ROOM = 10  # a peak has room in fp16 below 2 ** ROOM: six bits below the largest value, for later steps


def both_floating(args: tuple[Any, ...]) -> bool:
    return len(args) >= 2 and all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in args[:2])


def is_bf16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def keeps_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of KEEPS_RANGE is safe in fp16 with these arguments."""
    if is_bf16(args[0] if args else None):
        return False
    if func is F.pad:
        value = kwargs.get("value", args[3] if len(args) > 3 else None)
        return value is None or (abs(value) <= 2.0**ROOM and is_exact(value))
    if func is F.interpolate:
        return kwargs.get("mode", "nearest") == "nearest" and len(args) < 4
    return True


def is_rope_kernel(func: Any) -> bool:
    """Return whether this is one of ComfyUI's kernels for rotary embeddings."""
    return isinstance(func, OPERATORS) and func.__name__ in _ROPE_KERNELS


def is_recorded(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the first step records a function's output, so that a plan may make it fp16."""
    return both_floating(args) if func in PRODUCTS else func in NORMS or func in MODULATIONS or is_rope_kernel(func)


def reads_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function reinterprets a tensor's bytes as another dtype."""
    return func is _T.view and any(isinstance(each, torch.dtype) for each in (*args[1:], *kwargs.values()))


def _is_to_integers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cast gives integers or 8-bit floats, which have no infinity."""
    asked = [*args[1:], *kwargs.values()]
    if name in ("to", "type_as"):  # another tensor
        asked += [each.dtype for each in asked if isinstance(each, torch.Tensor)]
    if name == "type" and any("Tensor" in str(each) and "Float" not in str(each) for each in asked):  # by its class
        return not any(kind in str(each) for each in asked for kind in ("Half", "Double"))
    dtypes = [each for each in asked if isinstance(each, torch.dtype)]
    return any(not (each.is_floating_point or each.is_complex) or each.itemsize < 2 for each in dtypes)


def _is_to_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a device tensor is copied to the host: tensors there are not checked later."""
    if name != "to" or args[0].device.type == "cpu":
        return False
    asked = (each for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device)))
    return any(torch.device(each).type == "cpu" for each in asked)


def is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an activation is called with `inplace`."""
    return bool(kwargs.get("inplace")) or (func in _ACTIVATIONS and any(each is True for each in args[1:]))


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function changes in place."""
    if isinstance(func, OPERATORS):
        if not (places := _written_by(func)):
            return []
        named = {**dict(enumerate(args)), **kwargs}
        changed: Any = [named[at] for at in places if at in named]
    else:
        name = getattr(func, "__name__", "")
        out = kwargs.get("out")
        changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or out is not None
        if not ((changes and func not in METADATA) or is_in_place(func, args, kwargs)):
            return []
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        changed = first if out is None else out
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


@cache
def _written_by(operator: Any) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operator's schema declares as written to."""
    is_one = isinstance(operator, torch._ops.OpOverload)
    overloads = [operator] if is_one else [getattr(operator, name) for name in operator.overloads()]
    arguments = [(at, each) for overload in overloads for at, each in enumerate(overload._schema.arguments)]
    changed = [(at, each) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    changed = [(at, each) for at, each in changed if "Tensor" in str(each.type)]  # and not TorchScript's lists
    return frozenset(key for at, each in changed for key in (each.name, *(() if each.kwarg_only else (at,))))


def is_exact(value: Any) -> bool:
    """Return whether a value that is written into an fp16 tensor is exact there."""
    if isinstance(value, float):
        return float(torch.tensor(value, dtype=FP16)) == value or value != value
    return not (isinstance(value, torch.Tensor) and value.is_floating_point())


def is_small_factor(value: Any) -> bool:
    """Return whether a factor is small enough for the bits of fp16 above ROOM."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and 0.7 <= abs(value) <= 2.0**4)


def is_safe_quotient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this divides a tensor by a number that neither overflows nor underflows fp16."""
    if kwargs or len(args) != 2 or is_bf16(args[0]) or not isinstance(args[0], torch.Tensor):
        return False
    return isinstance(args[1], (int, float)) and 2.0**-4 <= abs(args[1]) <= 1.5


def is_fp16_and_number(args: tuple[Any, ...]) -> bool:
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    numbers = [each for each in args if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return len(args) == 2 and len(tensors) == len(numbers) == 1 and tensors[0].dtype is FP16


def is_plain_cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call only casts between fp16 and float32. The plan decides which of them a tensor has; the
    network always sees float32."""
    asked = [*args[1:], *(value for name, value in kwargs.items() if name not in ("non_blocking", "copy"))]
    dtypes, given = (FP16, torch.bfloat16, torch.float32), args[0]
    plain = not kwargs.get("copy") and all(isinstance(each, torch.dtype) and each in dtypes for each in asked)
    return plain and isinstance(given, torch.Tensor) and given.dtype in (FP16, torch.float32)


_T = torch.Tensor
NORM_ARGUMENTS: dict[Any, Callable[..., Any]] = {  # arguments → (x, shape or groups, weight, bias, eps)
    F.layer_norm: lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: (  # noqa: A006 - as they name it
        (input, normalized_shape, weight, bias, eps)
    ),
    F.group_norm: lambda input, num_groups, weight=None, bias=None, eps=1e-5: (  # noqa: A006
        (input, num_groups, weight, bias, eps)
    ),
    F.rms_norm: lambda input, normalized_shape, weight=None, eps=None: (  # noqa: A006
        (input, normalized_shape, weight, None, eps)
    ),
}
NORMS = frozenset(NORM_ARGUMENTS)
PRODUCTS = frozenset({torch.mul, torch.multiply, _T.mul, _T.multiply, _T.__mul__, _T.__rmul__})
REVERSED = frozenset({_T.__rsub__})
DIFFERENCES = frozenset({torch.sub, torch.subtract, _T.sub, _T.subtract, _T.__sub__, _T.__rsub__})
SUMS = frozenset({torch.add, _T.add, _T.__add__, _T.__radd__}) | DIFFERENCES
MODULATIONS = frozenset({torch.addcmul, _T.addcmul})  # a · b + c, and sums with a gate
# ComfyUI's kernels for rotary embeddings, by name: plain ones (apply_…), and with a norm before (rms_…)
_ROPES = ("rope", "rope1", "rope_split_half", "rope_split_half1")
_ROPE_KERNELS = frozenset(f"{kind}_{name}" for kind in ("apply", "rms") for name in _ROPES)
# sums and products in place: they compute in the dtype of the tensor that they write to
SUMS_IN_PLACE = frozenset({_T.add_, _T.sub_, _T.mul_, _T.addcmul_, _T.__iadd__, _T.__isub__, _T.__imul__})
QUOTIENTS = frozenset({torch.div, torch.true_divide, _T.div, _T.true_divide, _T.__truediv__})
CASTS = frozenset({_T.to, _T.half, _T.bfloat16, _T.float})
CASTS_LIKE = frozenset({_T.to, _T.type_as})  # another tensor
COPIES = frozenset({torch.cat, torch.concat, torch.stack, torch.clone, _T.clone})
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)})
_ACTIVATIONS = frozenset(
    {F.relu, F.relu6, F.silu, F.hardswish, F.hardsigmoid, F.mish, F.selu, F.celu, F.elu, F.leaky_relu}
)
# functions that return infinite or NaN values wherever their input has them: names without underscores at the ends
PROPAGATES = frozenset(
    """
    abs absolute neg negative positive square sqrt sin cos tan sinh cosh asin acos asinh acosh atanh log log2 log10
    log1p floor ceil round trunc frac deg2rad rad2deg real imag conj conj_physical polar complex view_as_real
    view_as_complex add radd iadd sub subtract rsub isub mul multiply rmul imul addcmul lerp addmm addmv addbmm addr
    baddbmm bmm mm mv matmul rmatmul imatmul dot vdot inner outer ger einsum tensordot kron cross linalg_cross bilinear
    linear sum mean prod cumsum cumprod std var std_mean var_mean trace cdist dist softmax log_softmax logsumexp
    special_softmax special_log_softmax special_logsumexp layer_norm group_norm rms_norm
    batch_norm instance_norm relu silu gelu mish hardswish leaky_relu prelu rrelu dropout alpha_dropout where
    masked_fill masked_scatter masked_select scatter scatter_add scatter_reduce gather take take_along_dim put
    index_select index_add index_copy index_fill index_put index_reduce select_scatter slice_scatter diagonal_scatter
    getitem setitem set get fill fill_diagonal zero copy cat concat concatenate stack hstack vstack dstack column_stack
    clone contiguous detach to type type_as float half bfloat16 double cuda dequantize pad
    interpolate upsample fold unfold im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle roll flip fliplr flipud
    rot90 tile repeat repeat_interleave tril triu diag diag_embed diagflat meshgrid broadcast_tensors broadcast_to
    tensor_split hsplit vsplit dsplit atleast_1d atleast_2d atleast_3d block_diag embedding amax amin aminmax avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d
    tensor as_tensor asarray has_compatible_shallow_copy_type parse_to len bool t adjoint swapdims moveaxis reshape_as
    ravel row_stack split_with_sizes unsafe_split unsafe_chunk resolve_conj resolve_neg narrow as_strided is_same_size
    deepcopy repr format logcumsumexp diff is_conj is_neg is_pinned record_stream weight_norm normal uniform bernoulli
    exponential cauchy log_normal geometric random view expand squeeze unsqueeze select split chunk unbind permute
    transpose diagonal movedim swapaxes slice
    """.split()  # noqa: SIM905 - one on each line would be 180
)
# functions that choose by values, or give them to code that may, also in masks: those have -inf, and nothing above 0
CHOOSES_BY_VALUE = frozenset(
    """
    eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isfinite isinf isnan isposinf isneginf
    nan_to_num nansum nanmean clamp clip clamp_min clamp_max hardtanh minimum maximum min max fmin fmax argmax argmin
    topk sort argsort msort median nanmedian mode kthvalue cummax cummin isin sign sgn signbit heaviside nonzero
    count_nonzero any all logical_not logical_and logical_or logical_xor bucketize searchsorted grid_sample to type
    long int short char byte bool float item tolist numpy array cpu
    """.split()  # noqa: SIM905
)
_DIVIDES = ("div", "divide", "true_divide", "truediv", "itruediv", "rdiv", "rtruediv", "addcdiv")
_POWERS = ("pow", "ipow", "float_power")
_OF_ORDER = ("norm", "vector_norm", "norm_except_dim", "normalize")
_NORM_KERNELS = ("rms_adaln", "adaln", "rms_rope", "rms_rope_split_half")  # of ComfyUI's


def inputs_to_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
    """Return the inputs whose overflow a function may hide behind finite values (all inputs, unless the function is
    known to propagate infinity and NaN), and whether they may be masks."""
    name = getattr(func, "__name__", "").strip("_").removesuffix("_copy")
    given = _inputs_hidden_by(func, name, args, {key: value for key, value in kwargs.items() if key != "out"})
    masks = name in CHOOSES_BY_VALUE or isinstance(func, OPERATORS)
    return [leaf for leaf in pytree.tree_leaves(given) if _may_be_infinite(leaf)], masks


def _inputs_hidden_by(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _DIVIDES:
        divisor = kwargs.get("tensor2", kwargs.get("other"))
        return args[0] if name[0] == "r" else args[-1] if divisor is None else divisor
    if name in _POWERS:
        power = args[1] if len(args) > 1 else kwargs.get("exponent", -1)
        inverts = isinstance(power, torch.Tensor) or (isinstance(power, (int, float)) and power < 0)
        return (args, kwargs) if inverts else ()
    if name in _OF_ORDER:
        order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2))
        return (args, kwargs) if isinstance(order, (int, float)) and order <= 0 else ()
    if name == "multi_head_attention_forward":  # the CPU's kernel returns 0 for NaN
        return args[:2], kwargs.get("query"), kwargs.get("key")
    if isinstance(func, OPERATORS):
        changed = {id(each) for each in written_tensors(func, args, kwargs)}
        read = [each for each in pytree.tree_leaves((args, kwargs)) if id(each) not in changed]
        return () if name in _NORM_KERNELS else read
    if isinstance(func, OneOperation) or name.endswith("_like") or name[:4] == "new_":
        return ()
    if name == "copy" and args and not args[0].is_floating_point():
        return args[1:]
    hides = _is_to_integers(name, args, kwargs) or _is_to_host(name, args, kwargs) or func in (_T.bool, _T.__float__)
    if name in PROPAGATES and not hides:
        return ()
    if name in CHOOSES_BY_VALUE:  # a tensor of one number is a bound, which may be infinite
        rest = (*args[1:], *kwargs.values())
        return args[:1], [each for each in rest if not (isinstance(each, torch.Tensor) and each.numel() == 1)]
    return args, kwargs


def _may_be_infinite(value: Any) -> bool:
    """Return whether a value is a tensor that may hold infinity, and that PyTorch can check for it."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.itemsize < 2:
        return False
    plain = value.layout is torch.strided and not (value.is_meta or value.is_nested or is_quantised(value))
    return plain and not _FUNCTORCH.is_functorch_wrapped_tensor(value)


_FUNCTORCH: Any = getattr(torch._C, "_functorch")  # noqa: B009 - it has no stubs
# functions that do not compute on values
NO_MATH = frozenset(
    {
        *(ALIASING - {_T.cuda, _T.cpu}), *METADATA,
        torch.chunk, torch.unbind, torch.unflatten, _T.__setitem__, F.dropout,
        *(getattr(_T, name).__get__ for name in ("shape", "device", "ndim", "is_cuda", "requires_grad")),
    }
)  # fmt: skip
# functions that give a tensor's address to kernels that PyTorch does not see
POINTERS = frozenset({_T.data_ptr, _T.untyped_storage, _T.__dlpack__})
# functions whose output is no larger than their input, and that propagate infinity and NaN
KEEPS_RANGE = frozenset(
    {
        F.silu, F.gelu, F.relu, F.interpolate, F.pad, F.pixel_shuffle, F.pixel_unshuffle, torch.neg, _T.neg, _T.__neg__,
        torch.flip, torch.roll, torch.repeat_interleave, _T.repeat, _T.repeat_interleave, _T.flip, _T.roll,
    }
)  # fmt: skip
