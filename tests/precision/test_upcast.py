"""The fp32 rerun: bit-equal to module.float(), names modules it cannot run, and leaves no state behind."""

from __future__ import annotations

import copy
import linecache
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import upcast
from comfyui_onediff_guard.precision.upcast import Fp32Mode, OneOperation, RerunUnsupported, fp32_mode, run_in_fp32
from guards import guarded
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
HALVES = (HALF, BFLOAT)


class Block(nn.Module):
    """Every kind of layer that compares dtypes, and code with explicit casts."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.qkv = nn.Linear(8, 24)
        self.embedding = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x, token):
        x = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))
        x = x.to(self.out.weight.dtype) + self.embedding(token).mul_(2).to(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)
        return {"sample": self.out(x), "mask": torch.full((2, 2), torch.finfo(self.out.weight.dtype).min)}


def build(dtype):
    torch.manual_seed(0)
    module = Block().to(dtype).eval().requires_grad_(False)
    return module, torch.randn(2, 3, 6, 6).to(dtype), torch.tensor([[3]])


def state(module):
    return {
        name: (tensor.clone(), tensor.dtype, id(tensor)) for name, tensor in module.state_dict(keep_vars=True).items()
    }


def assert_untouched(module, before):
    after = state(module)
    assert after.keys() == before.keys()
    for name, (tensor, dtype, identity) in before.items():
        assert after[name][1:] == (dtype, identity) and torch.equal(after[name][0], tensor)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "thread"])
def test_rerun_is_bit_equal_to_module_float(dtype, how):
    module, x, token = build(dtype)
    before = state(module)
    expected = copy.deepcopy(module).float()(x.float(), token)
    with torch.inference_mode(how == "inference_mode"), ThreadPoolExecutor(1) as pool:
        found = (
            pool.submit(run_in_fp32, module, x, token).result() if how == "thread" else run_in_fp32(module, x, token)
        )
    for name in expected:
        assert found[name].dtype == SINGLE and torch.equal(found[name], expected[name])
    assert_untouched(module, before)


def test_rerun_that_raises_leaves_no_state():
    module, x, token = build(HALF)
    before, broken = state(module), copy.copy(module)
    broken.forward = lambda *_: (_ for _ in ()).throw(KeyError("inside"))
    with pytest.raises(KeyError, match="inside"):
        run_in_fp32(broken, x, token)
    assert_untouched(module, before)
    assert module(x, token)["sample"].dtype == HALF


class Marked(torch.Tensor):
    """A subclass whose results keep the class, like packs' tensors that mark their storage by it."""


KEEPS_SUBCLASS = {
    "a sum": lambda x: x + x,
    "a layer": lambda x: torch.nn.functional.linear(x, x),
    "a cast": lambda x: x.float(),
    "a cast to half": lambda x: x.float().half(),
    "a copy": lambda x: x.clone(),
    "an indexed copy": lambda x: x[[0, 1]],
    "a list": lambda x: torch.cat([x, x]),
    "parts": lambda x: x.topk(1)[0],
    "a row of an embedding": lambda x: torch.nn.functional.embedding(torch.tensor([0]), x),
}


@pytest.mark.parametrize("name", KEEPS_SUBCLASS)
def test_results_keep_the_tensor_subclass(name):
    half = torch.arange(4, dtype=HALF).reshape(2, 2).as_subclass(Marked)
    assert type(KEEPS_SUBCLASS[name](half)) is Marked
    assert type(made := run_in_fp32(KEEPS_SUBCLASS[name], half)) is Marked and made.dtype == SINGLE
    with fp32_mode(Fp32Mode(), tf32=False):
        assert type(KEEPS_SUBCLASS[name](half)) is Marked


def test_other_threads_stay_in_half():
    module, x, token = build(BFLOAT)
    with fp32_mode(Fp32Mode(), tf32=False), ThreadPoolExecutor(1) as pool:
        elsewhere, here = pool.submit(module, x, token).result(), module(x, token)
    assert (elsewhere["sample"].dtype, here["sample"].dtype) == (BFLOAT, SINGLE)


def test_no_dynamo_graph_is_added():
    from torch._dynamo.utils import counters  # imported here, so that earlier tests run without it

    module, x, token = build(HALF)
    inner = torch.compile(module.out, backend="eager")
    inner(torch.zeros(1, 8, dtype=HALF))
    shell = copy.copy(module)
    shell._modules = dict(module._modules) | {"out": inner}
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    run_in_fp32(shell, x, token)
    assert counters["stats"]["unique_graphs"] == graphs
    inner(torch.zeros(1, 8, dtype=HALF))
    assert counters["stats"]["unique_graphs"] == graphs, "the stance is restored and nothing recompiles"


def test_dtype_reads_as_float32_without_upcasting_the_tensor(monkeypatch):
    weight = torch.zeros(4, 5, dtype=HALF)
    monkeypatch.setattr(upcast, "_upcast", lambda *_: pytest.fail("a property read upcast the tensor"))
    with fp32_mode(Fp32Mode(), tf32=False):
        facts = (weight.dtype, weight.shape, weight.device, weight.ndim, weight.size(0), weight.numel(), len(weight))
    assert facts == (SINGLE, torch.Size([4, 5]), torch.device("cpu"), 2, 4, 20, 4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ x


@torch.library.custom_op("onediff_guard_test::square", mutates_args=())
def custom_square(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def autocast_inside(weight):
    with torch.autocast("cpu", dtype=HALF):
        return weight @ weight


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "product",
    [
        lambda w: torch.ops.aten.mm.default(w, w),
        lambda w: torch.einsum("ij,jk->ik", w, w),
        lambda w: torch.mm(w, w, out=torch.empty(4, 4, dtype=HALF)),
        lambda w: torch.vmap(lambda row: row * 1200)(w),
        lambda w: torch.utils.checkpoint.checkpoint(lambda x: x @ x, w, use_reentrant=False),
        Square.apply,
        custom_square,
        autocast_inside,
    ],
)
def test_every_operator_call_runs_in_fp32_without_autocast(product, autocast):
    weight = torch.full((4, 4), 300.0, dtype=HALF)
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        found, asked = run_in_fp32(lambda: (product(weight), torch.is_autocast_enabled("cpu")))
        assert torch.is_autocast_enabled("cpu") == autocast
    assert found.dtype == SINGLE and found.max() == 360000 and not asked


def test_half_default_dtype_is_ignored():
    torch.set_default_dtype(HALF)
    try:
        assert run_in_fp32(lambda: torch.zeros(1).add_(300) * 300).item() == 90000
    finally:
        torch.set_default_dtype(SINGLE)


def test_fused_multihead_attention_matches_float_within_rounding():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).half().eval().requires_grad_(False)
    x = torch.randn(2, 5, 8).half()
    expected = copy.deepcopy(attention).float()(x.float(), x.float(), x.float())[0]
    assert torch.allclose(run_in_fp32(attention, x, x, x)[0], expected, atol=1e-6)


# --- code that cannot run in float32 is named; other errors are raised unchanged --------------------------------------


@torch.jit.script
def scripted_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@torch.jit.script
def scripted_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


class Calls(nn.Module):
    """Calls a function of a product, or of input and weight, like a kernel that supports half precision only."""

    def __init__(self, function, binary=False):
        super().__init__()
        self.function, self.binary = function, binary
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=HALF), requires_grad=False)

    def forward(self, x):
        return self.function(x, self.weight) if self.binary else self.function(x @ self.weight)


class Threaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2).half()

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.inner, x).result()


@torch.library.custom_op("onediff_guard_test::half_attention", mutates_args=())
def half_attention(q: torch.Tensor) -> torch.Tensor:
    if q.dtype not in HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return q.clone()


def diffusers_check(query):
    """The first check of diffusers' attention backends for half precision."""
    from diffusers.models import attention_dispatch

    attention_dispatch._check_qkv_dtype_bf16_or_fp16(query, query, query)


def type_error(query):
    if query.dtype not in HALVES:
        raise TypeError(f"unsupported dtype {query.dtype}, only half precision")


def assertion_with_words(query):
    assert query.dtype in HALVES, "Input tensors must be in dtype of torch.float16 or torch.bfloat16"


ASSERTION = "assert query.dtype in (torch.float16, torch.bfloat16)"


def assertion_without_message(query):
    file = "half_kernel.py"
    linecache.cache[file] = (len(ASSERTION), None, [f"{ASSERTION}\n"], file)
    exec(compile(ASSERTION, file, "exec"), {"torch": torch, "query": query})  # pytest rewrites assertions of this file


def second(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), module)


CALLS = r"'1' \(Calls\) cannot run in float32"


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    ("model", "cause", "said"),
    [
        (second(torch.jit.script(nn.Linear(2, 2).half())), None, "'1' is a TorchScript module"),
        (Threaded(), RuntimeError, r"'inner' \(Linear\) cannot run in float32.*another thread"),
        (second(Calls(half_attention)), RuntimeError, f"{CALLS}: .*FlashAttention only support"),
        (second(Calls(diffusers_check)), ValueError, f"{CALLS}: .*must be either bfloat16 or float16"),
        (second(Calls(type_error)), TypeError, f"{CALLS}: .*only half precision"),
        (second(Calls(assertion_with_words)), AssertionError, f"{CALLS}: .*must be in dtype of torch.float16"),
        (second(Calls(assertion_without_message)), AssertionError, rf"{CALLS}: .*\(assert query\.dtype in"),
    ],
)
def test_module_that_rejects_float32_is_named(model, cause, said, bound):
    x = torch.zeros(1, 2, dtype=HALF)
    model(x)
    with pytest.raises(RerunUnsupported, match=said) as refused:
        run_in_fp32(model.forward if bound else model, x)
    assert cause is None or type(refused.value.__cause__) is cause


@pytest.mark.parametrize("function", [scripted_scale, scripted_product])
def test_scripted_function_runs_in_float32(function):
    x, calls = torch.full((2, 2), 300.3, dtype=HALF), Calls(function, binary=True)
    before = torch._C.ScriptFunction.__call__
    assert torch.equal(run_in_fp32(calls, x), function(x.float(), calls.weight.float()))
    assert torch._C.ScriptFunction.__call__ is before


def test_rerun_lifts_attention_kernel_restriction():
    q = torch.randn(1, 2, 8, 16).half()
    expected = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        found = run_in_fp32(lambda: F.scaled_dot_product_attention(q, q, q))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("forward() got an unexpected keyword argument 'dtype'"),
        TypeError("empty(): argument 'dtype' must be torch.dtype, not str"),
        TypeError("forward() missing 1 required positional argument: 'half'"),
        ValueError("the width must be half of the height"),
        RuntimeError("half of the frames are missing"),
        AssertionError(),
        AssertionError("3 frames"),
        KeyError("dtype"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("threaded", [False, True])
def test_unrelated_errors_are_raised_unchanged(error, threaded):
    def fails():
        raise error

    def forward():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fails).result() if threaded else fails()

    with pytest.raises(type(error)) as shown:
        run_in_fp32(forward)
    assert shown.value is error


# --- a weight transfer is one operation, and sees the true dtypes of the weights --------------------------------------

WEIGHT = torch.tensor([300.0, -2.5], dtype=HALF)
BYTES = WEIGHT.view(torch.uint8)


def read_weight(seen, given, dtype=None):
    """Read a weight from a buffer of bytes, in the requested dtype."""
    seen += [given.dtype, dtype, WEIGHT.dtype]
    return BYTES.view(WEIGHT.dtype).to(dtype or given.dtype)


def test_one_operation_sees_true_dtypes_and_returns_float32():
    seen, moved = [], OneOperation(read_weight)
    found = run_in_fp32(lambda: moved(seen, WEIGHT, HALF) * WEIGHT)
    assert torch.equal(found, torch.tensor([90000.0, 6.25]))
    assert moved(seen, WEIGHT, BFLOAT).dtype is BFLOAT, "outside of a rerun it is the plain function"
    assert seen == [SINGLE, SINGLE, HALF, HALF, BFLOAT, HALF] and moved.__doc__ == read_weight.__doc__


def test_one_operation_works_in_nested_modes_and_other_threads():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def fp32() -> AbstractContextManager[None]:
        return fp32_mode(Fp32Mode(), tf32=False)

    for outer, inner in ((fp32, Mode), (Mode, fp32), (fp32, fp32)):
        seen, elsewhere = [], []
        with outer(), inner(), ThreadPoolExecutor(1) as pool:
            assert OneOperation(OneOperation(read_weight))(seen, given=WEIGHT).dtype is SINGLE
            pool.submit(OneOperation(read_weight), elsewhere, WEIGHT).result()
        assert seen == [SINGLE, None, HALF] and elsewhere == [HALF, None, HALF]


def test_error_in_one_operation_is_raised_and_rerun_continues():
    def rerun():
        with pytest.raises(KeyError, match="weight"):
            OneOperation({}.__getitem__)("weight")
        return WEIGHT * WEIGHT

    assert run_in_fp32(rerun)[0] == 90000


# --- half tensors that are written, viewed, converted, or read as bits ------------------------------------------------


def in_place(buffer):
    buffer.add_(1)
    buffer[0] = 7
    buffer[1:].mul_(2)
    buffer.view(-1)[2] = 9
    buffer.copy_(buffer * 2)
    torch.add(buffer, 1, out=buffer)
    F.relu(buffer, inplace=True)
    F.hardtanh(buffer, -1, 40, inplace=True)
    buffer += 0.5
    return buffer


def through_views(buffer):
    buffer = buffer.view(2, 2)
    for row in buffer:
        row.add_(1)
    buffer.ravel()[0] = 7
    buffer.tensor_split(2)[1].add_(5)
    buffer.unsqueeze_(0)
    buffer.real.mul_(2)
    torch.movedim(buffer, 0, 1).add_(0.5)
    buffer.mT.sub_(1)
    torch.transpose(input=buffer, dim0=0, dim1=1).add_(1)
    torch.split(tensor=buffer, split_size_or_sections=1, dim=1)[1].add_(1)
    return buffer.view(4)


@pytest.mark.parametrize("write", [in_place, through_views])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_in_place_writes_reach_half_tensors_their_views_and_aliases(write, inference_mode):
    expected, buffer = write(torch.arange(4.0)), torch.arange(4, dtype=HALF)
    alias = buffer[1:]
    with torch.inference_mode(inference_mode):
        returned = run_in_fp32(lambda: write(buffer))
    assert buffer.dtype == HALF
    assert torch.equal(buffer.float(), expected) and torch.equal(alias.float(), expected[1:])
    assert torch.equal(returned.float(), expected)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_inference_tensors_that_are_only_read_are_not_written(inference_mode):
    """ComfyUI loads weights in inference mode; its threads for several GPUs run outside of it and cannot write."""
    with torch.inference_mode():
        weight = torch.arange(4, dtype=HALF)
        views, buffer = [weight.view(2, 2)[1]], torch.zeros(2, dtype=HALF)
    read = run_in_fp32(lambda: views[0] * 30000)
    assert read.tolist() == [60000.0, 90000.0]
    with torch.inference_mode(inference_mode):
        returned = run_in_fp32(lambda: weight.view(2, 2)[0])
    assert returned.data_ptr() == weight.data_ptr() and returned.dtype == HALF
    with torch.inference_mode():
        run_in_fp32(lambda: buffer.add_(1)[1:].mul_(2))
    assert buffer.tolist() == [1.0, 2.0]


def test_in_place_write_on_argument_is_fp32_and_reaches_the_caller():
    x = torch.full((2,), 1000.0, dtype=HALF)
    assert run_in_fp32(lambda t: t.mul_(t).sqrt_(), x).tolist() == [1000.0, 1000.0]
    assert x.dtype == HALF and x.tolist() == [1000.0, 1000.0]


def test_copies_of_half_tensors_are_float32():
    table = torch.full((4, 2), 60000.0, dtype=HALF)
    rows = run_in_fp32(lambda: table[torch.tensor([1, 2])].mul_(4))
    assert rows.dtype == SINGLE and rows.max() == 240000 and table.max() == 60000


def test_views_as_other_dtype_reinterpret_bits():
    packed, weight = torch.tensor([1.5, -2.0], dtype=HALF).view(torch.uint8), torch.tensor([1.5], dtype=HALF)
    assert run_in_fp32(lambda: packed.view(HALF) * 1).tolist() == [1.5, -2.0]
    assert run_in_fp32(lambda: packed.view(dtype=HALF) * 1).tolist() == [1.5, -2.0]
    assert run_in_fp32(lambda: weight.view(torch.int16)).tolist() == weight.view(torch.int16).tolist()


def test_setting_data_keeps_the_dtype():
    parameter = nn.Parameter(torch.zeros(2, dtype=HALF), requires_grad=False)
    run_in_fp32(lambda: setattr(parameter, "data", torch.ones(2)))
    assert parameter.dtype == HALF and parameter.tolist() == [1.0, 1.0]


OF = {dtype: torch.ones(2, dtype=dtype) for dtype in (HALF, BFLOAT, SINGLE)}
TYPE = {dtype: tensor.type() for dtype, tensor in OF.items()}
BY_NAME = {HALF: torch.Tensor.half, BFLOAT: torch.Tensor.bfloat16, SINGLE: torch.Tensor.float}
CONVERSIONS: dict[str, Any] = {
    "to(dtype)": lambda x, dtype: x.to(dtype),
    "to(device, dtype)": lambda x, dtype: x.to("cpu", dtype),
    "to(tensor)": lambda x, dtype: x.to(OF[dtype]),
    "type(dtype)": lambda x, dtype: x.type(dtype),
    "type(str)": lambda x, dtype: x.type(TYPE[dtype]),
    "type_as": lambda x, dtype: x.type_as(OF[dtype]),
    "as_tensor": lambda x, dtype: torch.as_tensor(x, dtype=dtype),
    "asarray": lambda x, dtype: torch.asarray(x, dtype=dtype),
}
COPIES: dict[str, Any] = {
    **{name: lambda x, convert=convert: convert(x, HALF) for name, convert in CONVERSIONS.items()},
    "half()": lambda x: x.half(),
    "bfloat16()": lambda x: x.bfloat16(),
    "type(class)": lambda x: x.type(torch.BFloat16Tensor),
    "to(keyword)": lambda x: x.to(dtype=BFLOAT),
    "to(tensor=)": lambda x: x.to(tensor=OF[HALF]),
    "to(memory_format)": lambda x: x.to(HALF, memory_format=torch.channels_last),
    "to(copy)": lambda x: x.to(x.dtype, copy=True),
}
MADE: dict[str, Any] = {
    "type(half class)": lambda w: w.type(torch.HalfTensor),
    "zeros": lambda w: w * 1 + torch.zeros(4, dtype=HALF),
    "new_zeros": lambda w: w + w.new_zeros(4),
    "cat": lambda w: torch.cat([w, w]),
}
ALIASES: dict[str, Any] = CONVERSIONS | {
    "to(device)": lambda x, _dtype: x.to("cpu"),
    "by name": lambda x, dtype: BY_NAME[dtype](x),
}


def written_to(convert: Callable[..., torch.Tensor], source: torch.Tensor, *more: Any) -> tuple[Any, Any]:
    """(the converted tensor after a write to it, the source)"""
    made = convert(source, *more)
    made.add_(1)
    return made, source


@pytest.mark.parametrize("form", COPIES | MADE)
def test_tensors_created_as_half_are_float32(form):
    weight = torch.full((1, 2, 3, 4), 65504.0, dtype=HALF)
    made = run_in_fp32(lambda: (COPIES | MADE)[form](weight) * 2)
    assert made.dtype == SINGLE and made.eq(131008).all()


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("given", [SINGLE, torch.float64, torch.int64])
def test_conversion_to_half_copies_without_rounding(form, given):
    tensor = torch.full((1, 2, 3, 4), 1_000_001, dtype=given)
    made, source = run_in_fp32(lambda: written_to(COPIES[form], tensor))
    assert source.eq(1_000_001).all(), "the source is unchanged"
    assert made.eq(1_000_002).all() and made.dtype == (given if form == "to(copy)" else SINGLE)
    assert made.is_contiguous(memory_format=torch.channels_last) == (form == "to(memory_format)")


@pytest.mark.parametrize("given", HALVES)
@pytest.mark.parametrize("convert", [torch.Tensor.float, lambda x: x.to(SINGLE), lambda x: x.type("torch.FloatTensor")])
def test_half_tensor_converted_to_float32_is_a_copy(convert, given):
    tensor = torch.full((2,), 3.0, dtype=given)
    made, _ = run_in_fp32(lambda: written_to(convert, tensor))
    assert tensor.eq(3).all() and made.eq(4).all() and made.dtype == SINGLE


@pytest.mark.parametrize("form", ALIASES)
@pytest.mark.parametrize("given", OF)
def test_conversion_to_own_dtype_does_not_copy(form, given):
    expected = written_to(ALIASES[form], torch.full((1, 2, 3, 4), 3.0, dtype=given), given)[1]
    tensor = torch.full((1, 2, 3, 4), 3.0, dtype=given)
    run_in_fp32(lambda: written_to(ALIASES[form], tensor, given))
    assert torch.equal(tensor, expected) and tensor.eq(4).all()


def test_tensor_type_reads_as_float_tensor():
    assert run_in_fp32(lambda: torch.ones(1, dtype=HALF).type()) == "torch.FloatTensor"


def test_changes_to_list_and_dict_arguments_reach_the_caller():
    half = torch.ones(2, dtype=HALF)
    queue, cache = [half], {"first": half, "gone": half}

    def remember(queue, cache):
        queue[0].mul_(2)
        queue.append(queue[0] + 1)
        cache["second"] = cache.pop("gone") + 1

    run_in_fp32(remember, queue, cache)
    assert queue[0] is cache["first"] is half and half.tolist() == [2, 2] and half.dtype == HALF
    assert queue[1].tolist() == cache["second"].tolist() == [3, 3] and [*cache] == ["first", "second"]


# --- PyTorch's process-wide settings while a rerun holds TF32 ---------------------------------------------------------

MATMUL, CUDNN, MKLDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
READS: dict[str, Any] = {
    "matmul, old": lambda: MATMUL.allow_tf32,
    "matmul by word": torch.get_float32_matmul_precision,
    "cudnn, old": lambda: CUDNN.allow_tf32,
    "matmul": lambda: MATMUL.fp32_precision,
    "convolutions": lambda: CUDNN.conv.fp32_precision,
    "recurrent": lambda: CUDNN.rnn.fp32_precision,
    "CUDA": lambda: CUDNN.fp32_precision,
    "on the CPU": lambda: MKLDNN.matmul.fp32_precision,
}


def settings():
    def read(name):
        try:
            return READS[name]()
        except RuntimeError:
            return "raises"

    return {name: read(name) for name in READS}


def reset_precision_settings():
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = MKLDNN.matmul.fp32_precision = "none"
    CUDNN.allow_tf32 = True


@pytest.fixture
def restored_settings():
    before = settings()
    yield
    reset_precision_settings()
    assert settings() == before


def chosen(switch, **values):
    return lambda: [setattr(switch, name, value) for name, value in values.items()]


def old_and_new():
    torch.set_float32_matmul_precision("medium")
    MATMUL.fp32_precision = "ieee"


USER_SETTINGS: dict[str, Callable[[], Any]] = {
    "unset": lambda: None,
    "old switch on": chosen(MATMUL, allow_tf32=True),
    "old switch off": chosen(MATMUL, allow_tf32=False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "new setting tf32": chosen(MATMUL, fp32_precision="tf32"),
    "new setting ieee": chosen(MATMUL, fp32_precision="ieee"),
    "new setting for all": chosen(torch.backends, fp32_precision="ieee"),
    "old and new": old_and_new,
    "cudnn off": chosen(CUDNN, allow_tf32=False),
    "cudnn ieee": chosen(CUDNN.conv, fp32_precision="ieee"),
    "recurrent ieee": chosen(CUDNN.rnn, fp32_precision="ieee"),
}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("user_setting", USER_SETTINGS)
def test_tf32_switch_restores_old_and_new_settings(user_setting, on, restored_settings):
    USER_SETTINGS[user_setting]()
    before = settings()
    with ThreadPoolExecutor(1) as pool:
        here, elsewhere = run_in_fp32(lambda: (settings(), pool.submit(settings).result()), tf32=on)
    assert here == elsewhere
    assert (here["matmul"] == "tf32", here["convolutions"] == "tf32") == (on, on)
    raising = {name for name, value in here.items() if value == "raises"}
    assert raising <= {name for name, value in before.items() if value == "raises"}, "no setting newly raises"
    assert settings() == before


def test_inherited_fp32_precision_is_inherited_again(restored_settings):
    torch.backends.fp32_precision = "ieee"
    run_in_fp32(lambda: None, tf32=True)
    torch.backends.fp32_precision = "tf32"
    assert MATMUL.fp32_precision == "tf32"


@pytest.mark.parametrize(("first", "second", "seen"), [
    (True, True, "tf32 tf32 tf32"),
    (True, False, "none none tf32"),
    (False, True, "none none none"),
    (False, False, "none none none"),
])  # fmt: skip
def test_plain_fp32_wins_over_tf32_where_reruns_overlap(first, second, seen, restored_settings):
    inside, leave, found, before = threading.Event(), threading.Event(), [], settings()

    def read():
        found.append(CUDNN.conv.fp32_precision)

    def outer():
        inside.set()
        leave.wait(30)
        read()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_fp32, outer, tf32=first)
        assert inside.wait(30)
        run_in_fp32(lambda: (read(), read()), tf32=second)
        leave.set()
        running.result()
    assert found == seen.split() and settings() == before


@pytest.mark.parametrize(("dtype", "exact_fp32", "seen"), [
    ("fp32", True, ["none"]),
    ("fp32", False, ["tf32"]),
    ("fp16", True, ["tf32", "none"]),
    ("fp16", False, ["tf32", "tf32"]),
])  # fmt: skip
def test_exact_fp32_disables_tf32_in_calls_and_reruns(dtype, exact_fp32, seen, restored_settings):
    found, before = [], settings()

    def called(given):
        found.append(CUDNN.conv.fp32_precision)
        return given * 6e4 * 6e4

    guarded(called, dtype, exact_fp32=exact_fp32, tf32=True)(torch.ones(2))
    assert (found, settings()) == (seen, before)


def test_rerun_works_where_current_accelerator_raises(monkeypatch):
    def none_available():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none_available)
    layer = nn.Linear(4, 4).half()
    assert torch.equal(run_in_fp32(layer, torch.ones(1, 4)), copy.deepcopy(layer).float()(torch.ones(1, 4)))
