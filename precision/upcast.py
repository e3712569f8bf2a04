"""The fp32 rerun: run a half-precision module in float32 without a second set of weights.

`run_in_fp32(module, ...)` is bit-equal to `module.float()(...)`, changes no parameter, registers no hook and compiles
nothing. Each half tensor that an operation touches is upcast for that operation alone, so the extra memory is one
layer's weights in float32.

A function mode is the right level: a dispatch mode is too low, since conv2d has compared dtypes before it is reached.
There is one exception to bit-equality: `nn.MultiheadAttention` does not take its fused path under a function mode, so
there the result is equal up to rounding.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, partialmethod, update_wrapper
from types import CodeType, TracebackType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from ..trust.message import Told
from .dtypes import HALF_DTYPES
from .process_state import SharedSetting


class TraceableMode(TorchFunctionMode):
    """A function mode that dynamo traces as part of a compiled function, but never compiles by itself.

    If dynamo gives up a frame, the calls of that frame run one by one, and dynamo would compile `__torch_function__` as
    a frame of its own. There a property such as `Tensor.dtype` becomes a constant without a guard: it would hold for
    the next tensor too, and give results of the wrong dtype.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for function in (cls.__torch_function__, cls.compute):
            _compile_what_it_calls_alone(function.__code__)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of a function of PyTorch, and return its result. Subclasses do some otherwise."""
        return func(*args, **kwargs)


def _compile_what_it_calls_alone(code: CodeType) -> None:
    known: Any = eval_frame  # C, with no stubs; torch._dynamo's own `skip_code` would import all of the compiler
    if skip := getattr(known, "skip_code", None):  # before PyTorch 2.8
        skip(code)
    else:
        action = known._FrameAction
        known.set_code_exec_strategy(code, known._FrameExecStrategy(action.SKIP, action.DEFAULT))


Result = TypeVar("Result")
_Memo = dict[int, tuple[torch.Tensor, torch.Tensor]]  # id of a half tensor → the tensor, and its float32 copy
_Copied = tuple[Any, Any, list[Any]]  # a list or dict of the caller's, its copy, and the copy's first items


class RerunUnsupported(Told, RuntimeError):
    """A part of the module cannot run in float32 from outside; the message names it."""


def run_in_fp32(function: Callable[..., Result], *args: Any, tf32: bool = False, **kwargs: Any) -> Result:
    """Call `function` (a module or any callable that runs modules) in float32.

    args, kwargs: passed on, with every fp16/bf16 tensor in them upcast. A tensor that the function changes in place
        is written back to the caller's tensor in the caller's dtype.
    tf32: whether products and convolutions may use TF32 meanwhile (fp32's range, fp16's mantissa; sm80 and later).

    Returns what the function returns; half-precision results are float32.

    Raises RerunUnsupported, naming the module, where a part cannot take float32: a TorchScript module with half
    weights, a thread started inside forward, an attention kernel for half precision only. Any other error is raised as
    it is, also a thread's.
    """
    return run_in(Fp32Mode(), function, args, kwargs, tf32=tf32)


def run_in(
    mode: Fp32Mode,
    function: Callable[..., Result],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    tf32: bool = False,
) -> Result:
    """Do the same as `run_in_fp32`, in a mode that may compute some functions in another way."""
    module = getattr(function, "__self__", function)
    if isinstance(module, torch.nn.Module) and mode.is_first:
        _refuse_scripted(module)
    memo: _Memo = {}
    copies: list[_Copied] = []
    fp32_args, fp32_kwargs = _with_copies(args, memo, copies), _with_copies(kwargs, memo, copies)
    mode.begin((fp32_args, fp32_kwargs))
    try:
        with fp32_mode(mode, tf32=tf32):
            result = function(*fp32_args, **fp32_kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        complaint = _dtype_complaint(error)
        if isinstance(error, RerunUnsupported) or not complaint:
            raise
        culprit = _innermost_module(error.__traceback__, module)
        raise RerunUnsupported(
            "{} cannot run in float32: {}. It uses a kernel that the rerun cannot reach (another thread, or an "
            "attention kernel for half precision only). Switch that kernel off (PyTorch's own attention works), or "
            "choose precision 'fp32' or 'bf16'.",
            culprit,
            complaint,
        ) from error
    mode.end()
    _write_back(memo.values())
    _write_containers_back(copies, {id(single): half for half, single in memo.values()})
    return result


def _with_copies(value: Any, memo: _Memo, copies: list[_Copied]) -> Any:
    """Return arguments with half tensors upcast, in copies of their lists and dicts."""
    if (kind := type(value)) not in (list, dict, tuple):
        return pytree.tree_map_only(torch.Tensor, partial(_upcast, memo), value)
    items = [_with_copies(inside, memo, copies) for inside in (value.values() if kind is dict else value)]
    made = dict(zip(value, items, strict=True)) if kind is dict else kind(items)
    if kind is not tuple:
        copies.append((value, made, items))
    return made


def _write_containers_back(copies: list[_Copied], given: dict[int, Any]) -> None:
    """Apply changes of the copied lists and dicts to the caller's. given: half tensors by the ids of their copies."""
    given |= {id(copied): theirs for theirs, copied, _ in copies}
    for theirs, copied, before in copies:
        now = [*copied.values()] if isinstance(copied, dict) else [*copied]
        if [*map(id, now)] != [*map(id, before)]:
            now = [given.get(id(item), item) for item in now]
            theirs.clear()
            theirs.update(zip(copied, now, strict=True)) if isinstance(theirs, dict) else theirs.extend(now)


@contextmanager
def fp32_mode(mode: Fp32Mode, *, tf32: bool) -> Generator[None]:
    """Inside, this thread computes in float32, or as the mode decides. Half tensors from outside stay as they are."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(EAGER_ONLY.held())
        stack.enter_context(TF32.held(tf32))
        stack.enter_context(SCRIPTED.held())
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast_off_where_on(device_types()))
        stack.enter_context(mode)
        yield


class OneOperation:
    """A function that the rerun treats as one operation: half tensors and dtypes among its arguments arrive as float32;
    inside the function, no tensor is upcast.

    It is for functions that move and cast weights: they view the weights' bytes, so they need the real dtype.

    for_products: takes the products' dtype and the arguments, and returns the arguments with which the function casts
        the weights of products to that dtype.
    """

    def __init__(self, function: Callable[..., Any], for_products: Callable[..., Any] | None = None):
        update_wrapper(self, function)
        self._function = function
        self.for_products = for_products

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((None,)):  # a mode is active: it calls this function again, outside of the mode
            return handle_torch_function(self, (), *args, **kwargs)
        return self._function(*args, **kwargs)


class Fp32Mode(TraceableMode):
    """The mode in which every function of PyTorch computes in float32."""

    is_first = True  # whether to refuse scripted modules; later modes of the same run need not

    def __init__(self) -> None:
        super().__init__()
        self._device_types = device_types()

    def begin(self, inputs: Any) -> None:
        """Called with the arguments before each call."""

    def end(self) -> None:
        """Called after each call. May raise."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of a function of PyTorch in float32."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _access_property(func, name, args)
        if func in METADATA:
            return func(*args, **kwargs)
        if isinstance(func, OneOperation):
            return func(*map(_given_in_fp32, args), **{name: _given_in_fp32(value) for name, value in kwargs.items()})
        if func in _CONVERSIONS and args and isinstance(args[0], torch.Tensor):
            return _convert(func, args[0], args[1:], kwargs)
        if func in ALIASING and args:
            return _map_tree(partial(_fp32_unless_alias, args[0]), func(*args, **kwargs))
        if func is torch.nn.functional.embedding and (args[3] if len(args) > 3 else kwargs.get("max_norm")) is None:
            return _map_tree(_float, func(*args, **kwargs))
        if func in _PRODUCTS:
            args, kwargs = _map_tree(dequantised, (args, kwargs))

        memo: _Memo = {}
        in_fp32 = partial(_map_tree, partial(_upcast, memo), only=(torch.Tensor, torch.dtype))
        with torch._C.DisableTorchFunction():  # other modes need not see casts that are not the model's
            fp32_args = tuple(map(in_fp32, args))
            fp32_kwargs = dict(zip(kwargs, map(in_fp32, kwargs.values()), strict=True))
        with autocast_off_where_on(self._device_types):
            attends = func in _ATTENTION
            result = _call_attention(func, fp32_args, fp32_kwargs) if attends else func(*fp32_args, **fp32_kwargs)
        with torch._C.DisableTorchFunction():
            written = _write_back(memo.values())
            if written:
                return _map_tree(lambda made: written[id(made)] if id(made) in written else _float(made), result)
            if not _shares_storage(result, memo.values()):
                return _map_tree(_float, result)
        return func(*args, **kwargs)  # the result is a view: return a view of the half tensor instead


def _map_tree(change: Callable[[Any], Any], tree: Any, only: Any = torch.Tensor) -> Any:
    """Do the same as pytree's `tree_map_only`, several times as fast for the usual arguments and results."""
    kind = type(tree)
    if kind in _LEAVES:
        return change(tree) if issubclass(kind, only) else tree
    if kind is tuple or kind is list:
        return kind(map(partial(_map_tree, change, only=only), tree))
    if kind is dict:
        return dict(zip(tree, map(partial(_map_tree, change, only=only), tree.values()), strict=True))
    return pytree.tree_map_only(only, change, tree)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in HALF_DTYPES:
        return tensor
    if type(tensor) in _LEAVES:
        return tensor.float()
    with _ENABLE_TORCH_FUNCTION():  # so that a subclass returns its own class
        return tensor.float()


def is_quantised(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that stores its values in fewer bits than its dtype says."""
    return type(tensor).dequantize is not torch.Tensor.dequantize


def dequantised(tensor: torch.Tensor) -> torch.Tensor:
    """Return a quantised tensor as a plain float32 tensor, and any other as it is. Needed for products: those with
    quantised weights may round the other operand too."""
    return tensor.float().dequantize() if is_quantised(tensor) else tensor


def _given_in_fp32(argument: Any) -> Any:
    return _float(argument) if isinstance(argument, torch.Tensor) else fp32_dtype(argument)


def _upcast(memo: _Memo, value: Any) -> Any:
    """Return a float32 copy of a half tensor, with version counter 0 so that writes show; float32 for a half dtype; any
    other value as it is."""
    if not isinstance(value, torch.Tensor):
        return fp32_dtype(value)
    if value.dtype not in HALF_DTYPES:
        return value
    if id(value) not in memo:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            single = _float(value)
            single = single.data if single._version else single  # an inference tensor's begins at 1
        memo[id(value)] = (value, single)
    return memo[id(value)][1]


def _write_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Write copies that changed back to their half tensors. Returns {id(float32 copy): half tensor} of those."""
    written = {}
    for half, single in pairs:
        if single._version > 0:
            half.copy_(single)
            written[id(single)] = half
    return written


def _convert(func: Any, source: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `.to`, `.half`, `.type` and the like. They return an alias exactly when they do so outside of the rerun,
    else a copy in float32: code may write to a copy and later read the original.
    """
    if func is torch.Tensor.float or (func is torch.Tensor.to and args and args[0] is torch.float32):
        return _fp32_unless_alias(source, func(source, *args, **kwargs))
    asked = func(torch.empty((0,) * source.dim(), dtype=source.dtype, device=source.device), *args, **kwargs)
    to_half = isinstance(asked, torch.Tensor) and asked.dtype in HALF_DTYPES
    if to_half and source.dtype != asked.dtype:
        layout = kwargs.get("memory_format", torch.preserve_format)
        return source.to(asked.device, torch.float32, copy=True, memory_format=layout)
    if isinstance(asked, str):  # `.type()`
        return _TENSOR_TYPES.get(asked, asked)
    return _fp32_unless_alias(source, func(source, *args, **kwargs))


def fp32_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF_DTYPES else value


def _fp32_unless_alias(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Keep an alias of a half tensor in half precision, so that writes reach it; cast a copy to float32."""
    with torch._C.DisableTorchFunction():
        stays = made.dtype not in HALF_DTYPES or is_quantised(made) or storage_of(made) == storage_of(source)
        return made if stays else _float(made)


def _access_property(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    if name == "__set__":
        target, value = args
        if isinstance(value, torch.Tensor) and value.is_floating_point() and target.dtype in HALF_DTYPES:
            value = value.to(target.dtype)
        return func(target, value)
    return fp32_dtype(func(*args))


def _shares_storage(result: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    upcast = {storage_of(single) for _, single in pairs}
    tensors = (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)) if upcast else ()
    return any(t.numel() > 0 and storage_of(t) in upcast for t in tensors)


def storage_of(tensor: torch.Tensor) -> int:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or storage._cdata  # on "meta" it has no address
    except RuntimeError:  # inside vmap, and for sparse and quantised tensors: they have no storage
        return id(tensor)


def _call_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute SDPA by kernels that take float32, even if the user allows only half-precision ones."""
    if torch.backends.cuda.math_sdp_enabled() and not FP32_ATTENTION.is_held:
        return func(*args, **kwargs)
    with FP32_ATTENTION.held():
        return func(*args, **kwargs)


_T = torch.Tensor
_ENABLE_TORCH_FUNCTION = getattr(torch._C, "_EnableTorchFunction", nullcontext)  # later than PyTorch 2.6
_LEAVES = frozenset(
    {_T, torch.nn.Parameter, torch.dtype, torch.device, torch.Size, type(None), bool, int, float, str, slice}
)
_CONVERSIONS = frozenset({_T.to, _T.half, _T.bfloat16, _T.float, _T.type, _T.type_as, torch.as_tensor, torch.asarray})
# functions that read a tensor's metadata, or change its shape in place, without computing on its values
METADATA = frozenset(
    {
        _T.size, _T.stride, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.storage_offset, _T.data_ptr,
        _T.untyped_storage, _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference,
        _T.element_size, _T.get_device, _T.__len__, _T.__hash__, _T.is_set_to, _T.requires_grad_,
        _T.squeeze_, _T.unsqueeze_, _T.t_, _T.transpose_, _T.swapaxes_, _T.swapdims_, _T.as_strided_, _T.detach_,
        _T.set_, _T.resize_,
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip
ALIASING = frozenset(
    {
        _T.view, _T.view_as, _T.reshape, _T.permute, _T.transpose, _T.t, _T.flatten, _T.unflatten, _T.squeeze,
        _T.unsqueeze, _T.expand, _T.expand_as, _T.narrow, _T.select, _T.chunk, _T.split, _T.unbind, _T.movedim,
        _T.swapaxes, _T.diagonal, _T.unfold, _T.as_strided, _T.detach, _T.contiguous, _T.__getitem__, _T.__iter__,
        _T.cuda, _T.cpu,
        torch.reshape, torch.permute, torch.transpose, torch.flatten, torch.squeeze, torch.unsqueeze, torch.narrow,
        torch.select, torch.chunk, torch.split, torch.unbind, torch.movedim, torch.swapaxes, torch.diagonal,
    }
)  # fmt: skip
_PRODUCTS = frozenset(
    {
        torch.nn.functional.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.mv,
        torch.einsum, torch.tensordot, torch.inner, _T.matmul, _T.__matmul__, _T.__rmatmul__, _T.mm, _T.addmm, _T.bmm,
        _T.baddbmm, _T.mv, _T.inner,
    }
)  # fmt: skip
_ATTENTION = frozenset({torch.nn.functional.scaled_dot_product_attention})
_TENSOR_TYPES = {
    f"{module}.{half}": f"{module}.FloatTensor"
    for module in ("torch", "torch.cuda")
    for half in ("HalfTensor", "BFloat16Tensor")
}


def _refuse_scripted(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(p.dtype in HALF_DTYPES for p in child.parameters()):
            raise RerunUnsupported(
                "'{}' is a TorchScript module with half-precision weights, whose operations cannot be upcast. Load "
                "the model without scripting it, or choose precision 'fp32'.",
                name or type(module).__name__,
            )


_ABOUT_DTYPES = re.compile(
    r"(?<![.'\"\w])dtypes?\b(?!=)|scalar ?types?\b|\bb?float(16|32)|\bb?fp(16|32)\b|\bbf16\b"
    r"|(?-i:'Half')|c10::half|halftensor|\b(type:?|found) half\b|\bhalf[- ]precision",
    re.IGNORECASE,
)


def _dtype_complaint(error: BaseException) -> str:
    """Return the first line of an error by which a kernel refuses float32; "" if the error is about something else.

    An assertion is recognised by its source too: most have no message.
    """
    said = str(error).strip().split("\n", 1)[0].rstrip(".")
    if isinstance(error, AssertionError) and (source := _raised_by(error)):
        return f"{said} ({source})".strip() if "dtype" in source or _ABOUT_DTYPES.search(said) else ""
    return said if _ABOUT_DTYPES.search(str(error)) else ""


def _raised_by(error: BaseException) -> str:
    """Return the line of source that raised an error; "" if it is unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def _innermost_module(trace: TracebackType | None, module: object) -> str:
    """Return the name of the innermost module whose forward raised, from the traceback."""
    names = {id(m): n for n, m in module.named_modules()} if isinstance(module, torch.nn.Module) else {}
    found = type(module).__name__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            name = names.get(id(owner))
            found = f"'{name}' ({type(owner).__name__})" if name else type(owner).__name__
        trace = trace.tb_next
    return found


def device_types() -> tuple[str, ...]:
    """Return the types of devices that may compute: "cpu", and the accelerator's if there is one."""
    if not torch.accelerator.is_available():  # asked first: without one, torch 2.6 raises below
        return ("cpu",)
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast_off_where_on(device_types: Iterable[str]) -> AbstractContextManager[Any]:
    """Return a context with autocast off. It is entered for each function that is called, so it costs next to nothing
    if autocast is off anyway."""
    on = [each for each in device_types if _has_autocast(each) and torch.is_autocast_enabled(each)]
    if not on:
        return _AS_IT_IS
    with ExitStack() as stack:
        for device_type in on:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return stack.pop_all()


_AS_IT_IS = nullcontext()
_has_autocast = cache(torch.amp.is_autocast_available)  # "meta" has none


def _force_eager() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _allow_fp32_attention() -> Callable[[], None]:
    kernels = torch.nn.attention.SDPBackend
    with ExitStack() as held:
        held.enter_context(torch.nn.attention.sdpa_kernel([kernels.EFFICIENT_ATTENTION, kernels.MATH]))
        return held.pop_all().close


def _show_scripted_calls() -> Callable[[], None]:
    """Hand calls of scripted functions to function modes, which PyTorch does only with its own functions."""

    def shown(call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((None,)):  # a mode is active: it calls this function again, outside of the mode
            return handle_torch_function(function, (), *args, **kwargs)
        return call(function, *args, **kwargs)

    with ExitStack() as undo:
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            call: Any = kind.__call__
            setattr(kind, "__call__", partialmethod(partial(shown, call)))  # noqa: B010 - its stubs forbid assignment
            undo.callback(setattr, kind, "__call__", call)
        return undo.pop_all().close


def tf32_off(wanted: bool) -> AbstractContextManager[None]:
    """Return a context with TF32 off in this process's products and convolutions; if not wanted, one that changes
    nothing."""
    return TF32.held(False) if wanted else _AS_IT_IS


def _set_tf32(on: bool) -> Callable[[], None]:
    """Set TF32 by PyTorch's old switches, which set the new ones (2.9 and later) as well. If someone set only the new
    ones, reading an old one raises, in every thread. Returns the function that undoes it."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn

    def write_products(value: str) -> None:
        if value == "high":
            matmul.allow_tf32 = True  # setting "high" would change the CPU's products too
        else:
            torch.set_float32_matmul_precision(value)

    def write_convolutions(value: bool) -> None:
        cudnn.allow_tf32 = value

    products = (matmul, mkldnn.matmul) if hasattr(mkldnn, "matmul") else (matmul,)
    convolutions = (cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ()
    with ExitStack() as undo:
        undo.callback(_turn(on, torch.get_float32_matmul_precision, write_products, ("highest", "high"), products))
        undo.callback(_turn(on, lambda: cudnn.allow_tf32, write_convolutions, (False, True), convolutions))
        return undo.pop_all().close


def _turn(
    on: bool,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    values: tuple[Any, Any],
    operations: tuple[Any, ...],
) -> Callable[[], None]:
    """Turn TF32 on or off by one switch, if it is not so already. Returns the function that undoes it.

    read, write: the old switch. values: its values for off and on.
    operations: the objects whose new settings the old switch sets too; the first is the switch's own.
    """
    operations = tuple(each for each in operations if hasattr(each, "fp32_precision"))
    before = [each.fp32_precision for each in operations]  # their own, or inherited ones
    try:
        old = read()
        is_on = before[0] == "tf32" if before else old != values[False]
        mixed = (old != values[False]) != is_on  # someone set only a new setting
    except RuntimeError:
        old, is_on, mixed = None, before[0] == "tf32", True
    if is_on == on:
        return lambda: None
    if mixed:
        for operation in operations[:1] if on else operations:
            operation.fp32_precision = "tf32" if on else "ieee"
    else:
        write(values[on])

    def restore() -> None:
        if not mixed:
            write(old)
        for operation, precision in zip(operations, before, strict=True):
            inherited = precision == torch.backends.cudnn.fp32_precision  # from the setting for all of CUDA
            operation.fp32_precision = "none" if inherited else precision

    return restore


EAGER_ONLY = SharedSetting(_force_eager)
TF32 = SharedSetting(_set_tf32)  # if runs overlap, plain fp32 wins
FP32_ATTENTION = SharedSetting(_allow_fp32_attention)
SCRIPTED = SharedSetting(_show_scripted_calls)
