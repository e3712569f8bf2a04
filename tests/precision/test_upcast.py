"""The fp32 rerun: bit-equal to module.float(), and nothing left behind."""

from __future__ import annotations

import copy
import linecache
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.upcast import RerunUnsupported, run_in_fp32
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

HALVES = (torch.float16, torch.bfloat16)


class Block(nn.Module):
    """Layers of every kind that compares dtypes, and code that casts by hand."""

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


def build(dtype, seed=0):
    torch.manual_seed(seed)
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
        assert after[name][1:] == (dtype, identity)
        assert torch.equal(after[name][0], tensor)
    for child in module.modules():
        assert not child._forward_hooks and not child._forward_pre_hooks
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("inference_mode", [False, True])
def test_bit_equal_to_float(dtype, inference_mode):
    module, x, token = build(dtype)
    before = state(module)
    expected = copy.deepcopy(module).float()(x.float(), token)
    with torch.inference_mode(inference_mode):
        found = run_in_fp32(module, x, token)
    for name in expected:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], expected[name])
    assert_untouched(module, before)


def test_bit_equal_in_a_worker_thread():
    module, x, token = build(torch.float16)
    expected = copy.deepcopy(module).float()(x.float(), token)["sample"]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run_in_fp32, module, x, token).result()["sample"]
    assert torch.equal(found, expected)


def test_nothing_is_left_behind_when_it_raises():
    module, x, token = build(torch.float16)
    before = state(module)
    broken = copy.copy(module)
    broken.forward = lambda *_: (_ for _ in ()).throw(KeyError("inside"))
    with pytest.raises(KeyError, match="inside"):
        run_in_fp32(broken, x, token)
    assert_untouched(module, before)
    assert module(x, token)["sample"].dtype == torch.float16


def test_other_threads_stay_in_half():
    module, x, token = build(torch.bfloat16)
    inside, checked = threading.Event(), threading.Event()
    slow = copy.copy(module)

    def forward(*args):
        inside.set()
        assert checked.wait(30)
        return module(*args)

    slow.forward = forward
    with ThreadPoolExecutor(1) as pool:
        rerun = pool.submit(run_in_fp32, slow, x, token)
        assert inside.wait(30)
        half = module(x, token)["sample"]
        checked.set()
        assert half.dtype == torch.bfloat16
        assert rerun.result()["sample"].dtype == torch.float32


def test_no_dynamo_graph_is_added():
    from torch._dynamo.utils import counters

    module, x, token = build(torch.float16)
    inner = torch.compile(module.out, backend="eager")
    inner(torch.zeros(1, 8, dtype=torch.float16))
    shell = copy.copy(module)
    shell._modules = dict(module._modules) | {"out": inner}
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    run_in_fp32(shell, x, token)
    assert counters["stats"]["unique_graphs"] == graphs
    inner(torch.zeros(1, 8, dtype=torch.float16))
    assert counters["stats"]["unique_graphs"] == graphs, "the stance is restored and nothing recompiles"


class Recorder:
    """Runs a function of the input in fp32 and returns what it returns."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return run_in_fp32(self.function, *args)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("half()", lambda w: w.half()),
        ("bfloat16()", lambda w: w.bfloat16()),
        ("type(str)", lambda w: w.type("torch.HalfTensor")),
        ("type(class)", lambda w: w.type(torch.HalfTensor)),
        ("type(dtype)", lambda w: w.type(torch.float16)),
        ("to(dtype)", lambda w: w.to(torch.float16)),
        ("to(tensor)", lambda w: w.to(w)),
        ("to(keyword)", lambda w: w.to(dtype=torch.bfloat16)),
        ("zeros", lambda w: w * 1 + torch.zeros(3, dtype=torch.float16)),
        ("new_zeros", lambda w: w + w.new_zeros(3)),
        ("cat", lambda w: torch.cat([w, w])),
    ],
)
def test_casts_to_half_give_float32(name, function):
    weight = torch.full((3,), 65504.0, dtype=torch.float16)
    captured = run_in_fp32(lambda: function(weight) * 2)
    assert captured.dtype == torch.float32
    assert torch.isfinite(captured).all() and captured.max() == 131008


@pytest.mark.parametrize(
    "cast",
    [lambda x, w: x.to(w), lambda x, w: x.to(tensor=w), lambda x, w: x.type_as(w), lambda x, w: x.to("cpu", w.dtype)],
)
def test_casting_to_a_half_tensor_does_not_round_through_half(cast):
    weight = torch.ones(1, dtype=torch.float16)
    assert run_in_fp32(lambda: cast(torch.tensor([1e6 + 1]), weight)).item() == 1e6 + 1


def test_a_bound_method_names_its_modules_too():
    x = torch.ones(2, 2, dtype=torch.float16)
    shell = nn.Sequential(CallsScript(scripted_product))
    with pytest.raises(RerunUnsupported, match=r"'0' \(CallsScript\) cannot run in float32"):
        run_in_fp32(shell.forward, x)
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2).half()))
    with pytest.raises(RerunUnsupported, match="'0' is a TorchScript module"):
        run_in_fp32(scripted.forward, x)


def test_dtype_reads_as_float32_and_properties_upcast_nothing():
    weight = torch.zeros(4, 5, dtype=torch.float16)
    upcast = []

    def read():
        original = torch.Tensor.float
        facts = (weight.dtype, weight.shape, weight.device, weight.ndim, weight.size(0), weight.numel(), len(weight))
        upcast.append(original is torch.Tensor.float)
        return facts

    from comfyui_onediff_guard.precision import upcast as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_upcast", lambda *_: pytest.fail("a property read upcast the tensor"))
        with module.fp32_mode():
            facts = read()
    assert facts == (torch.float32, torch.Size([4, 5]), torch.device("cpu"), 2, 4, 20, 4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ x


@torch.library.custom_op("onediff_guard_test::square", mutates_args=())
def custom_square(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.mark.parametrize(
    "product",
    [
        lambda w: torch.ops.aten.mm.default(w, w),
        lambda w: torch.einsum("ij,jk->ik", w, w),
        lambda w: torch.mm(w, w, out=torch.empty(4, 4, dtype=torch.float16)),
        lambda w: torch.vmap(lambda row: row * 1200)(w),
        lambda w: torch.utils.checkpoint.checkpoint(lambda x: x @ x, w, use_reentrant=False),
        Square.apply,
        custom_square,
    ],
)
def test_every_way_of_calling_an_operator_is_seen(product):
    weight = torch.full((4, 4), 300.0, dtype=torch.float16)
    found = run_in_fp32(lambda: product(weight))
    assert found.dtype == torch.float32 and found.max() == 360000


def test_a_default_dtype_of_half_does_not_leak_in():
    torch.set_default_dtype(torch.float16)
    try:
        assert run_in_fp32(lambda: torch.zeros(1).add_(300) * 300).item() == 90000
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast_is_off(where):
    weight = torch.full((4, 4), 300.0, dtype=torch.float16)

    def product():
        if where == "inside":
            with torch.autocast("cpu", dtype=torch.float16):
                return weight @ weight
        return weight @ weight

    with torch.autocast("cpu", dtype=torch.float16, enabled=where == "outside"):
        found = run_in_fp32(product)
    assert found.dtype == torch.float32 and found.max() == 360000


def test_code_that_asks_for_autocast_is_told_that_it_is_off():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_in_fp32(lambda: torch.is_autocast_enabled("cpu")) is False
        assert torch.is_autocast_enabled("cpu")


def test_fused_multihead_attention_is_equal_to_rounding():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).half().eval().requires_grad_(False)
    x = torch.randn(2, 5, 8).half()
    expected = copy.deepcopy(attention).float()(x.float(), x.float(), x.float())[0]
    assert torch.allclose(run_in_fp32(attention, x, x, x)[0], expected, atol=1e-6)


@torch.jit.script
def scripted_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@torch.jit.script
def scripted_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


class CallsScript(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16), requires_grad=False)
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def test_scripted_functions_run_where_they_can_and_are_named_where_not():
    x = torch.full((2, 2), 3.0, dtype=torch.float16)
    assert torch.equal(run_in_fp32(CallsScript(scripted_scale), x), x.float())
    model = nn.Sequential(nn.Identity(), CallsScript(scripted_product))
    with pytest.raises(RerunUnsupported, match=r"'1' \(CallsScript\) cannot run in float32"):
        run_in_fp32(model, x)


def test_scripted_modules_with_half_weights_are_refused_by_name():
    scripted = torch.jit.script(nn.Linear(2, 2).half())
    model = nn.Sequential(nn.Identity(), scripted)
    with pytest.raises(RerunUnsupported, match="'1' is a TorchScript module"):
        run_in_fp32(model, torch.zeros(1, 2, dtype=torch.float16))


class Threaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2).half()

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.inner, x).result()


def test_child_threads_are_named():
    with pytest.raises(RerunUnsupported, match=r"'inner' \(Linear\) cannot run in float32"):
        run_in_fp32(Threaded(), torch.zeros(1, 2, dtype=torch.float16))


@torch.library.custom_op("onediff_guard_test::half_attention", mutates_args=())
def half_attention(q: torch.Tensor) -> torch.Tensor:
    if q.dtype not in HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return q.clone()


class HalfAttention(nn.Module):
    def forward(self, q):
        return half_attention(q)


def test_attention_for_half_only_is_named():
    model = nn.ModuleDict({"attn": HalfAttention()})
    model.forward = lambda q: model["attn"](q)
    q = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(RerunUnsupported, match=r"'attn' \(HalfAttention\).*FlashAttention only support"):
        run_in_fp32(model, q)
    assert model(q).dtype == torch.float16


def test_attention_restricted_to_half_kernels_is_opened_for_the_rerun():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16).half()
    expected = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        found = run_in_fp32(lambda: F.scaled_dot_product_attention(q, q, q))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.allclose(found, expected, atol=1e-6)


class Checked(nn.Module):
    """Attention by a kernel for half precision only, which says so in its own way."""

    def __init__(self, check):
        super().__init__()
        self.check = check
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16), requires_grad=False)

    def forward(self, x):
        query = x @ self.weight
        self.check(query)
        return query


def diffusers_check(query):
    """What its attention backends for half precision call first."""
    from diffusers.models import attention_dispatch

    attention_dispatch._check_qkv_dtype_bf16_or_fp16(query, query, query)


def type_error(query):
    if query.dtype not in HALVES:
        raise TypeError(f"unsupported dtype {query.dtype}, only half precision")


def assertion_with_words(query):
    assert query.dtype in HALVES, "Input tensors must be in dtype of torch.float16 or torch.bfloat16"


ASSERTION = "assert query.dtype in (torch.float16, torch.bfloat16)"


def assertion_alone(query):
    file = "half_kernel.py"
    linecache.cache[file] = (len(ASSERTION), None, [f"{ASSERTION}\n"], file)
    exec(compile(ASSERTION, file, "exec"), {"torch": torch, "query": query})  # pytest rewrites those of this file


@pytest.mark.parametrize(
    ("check", "kind", "words"),
    [
        (diffusers_check, ValueError, "must be either bfloat16 or float16"),
        (type_error, TypeError, "only half precision"),
        (assertion_with_words, AssertionError, "must be in dtype of torch.float16"),
        (assertion_alone, AssertionError, r"\(assert query\.dtype in"),
    ],
)
def test_a_kernel_that_refuses_float32_in_any_way_is_named(check, kind, words):
    model, x = nn.Sequential(nn.Identity(), Checked(check)), torch.zeros(1, 2, dtype=torch.float16)
    model(x)
    with pytest.raises(RerunUnsupported, match=rf"'1' \(Checked\) cannot run in float32: .*{words}") as refused:
        run_in_fp32(model, x)
    assert type(refused.value.__cause__) is kind


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
@pytest.mark.parametrize("where", ["in forward", "in a thread"])
def test_an_error_about_something_else_shows_as_itself(error, where):
    def fails():
        raise error

    def forward():
        if where == "in forward":
            return fails()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fails).result()

    with pytest.raises(type(error)) as shown:
        run_in_fp32(forward)
    assert shown.value is error


def test_a_threads_complaint_about_dtypes_is_kept_as_the_cause():
    with pytest.raises(RerunUnsupported, match="a thread of its own") as refused:
        run_in_fp32(Threaded(), torch.zeros(1, 2, dtype=torch.float16))
    assert isinstance(refused.value.__cause__, RuntimeError)


# --- TF32 -------------------------------------------------------------------------------------------------------------

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


def put_back():
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = MKLDNN.matmul.fp32_precision = "none"
    CUDNN.allow_tf32 = True


@pytest.fixture
def given_settings():
    before = settings()
    yield
    put_back()
    assert settings() == before


def chosen(switch, **values):
    return lambda: [setattr(switch, name, value) for name, value in values.items()]


def old_and_new():
    torch.set_float32_matmul_precision("medium")
    MATMUL.fp32_precision = "ieee"


BY_WHOM: dict[str, Callable[[], Any]] = {
    "nobody": lambda: None,
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


@pytest.mark.parametrize("by_whom", BY_WHOM)
def test_tf32_mixes_no_old_and_new_settings_and_leaves_them_as_they_were(by_whom, given_settings):
    BY_WHOM[by_whom]()
    before = settings()
    with ThreadPoolExecutor(1) as pool:
        here, there = run_in_fp32(lambda: (settings(), pool.submit(settings).result()), tf32=True)
    assert here == there
    assert here["matmul"] == here["convolutions"] == "tf32"
    raising = {name for name, value in here.items() if value == "raises"}
    assert raising <= {name for name, value in before.items() if value == "raises"}, "none that did not before"
    assert settings() == before


def test_a_setting_that_was_inherited_is_inherited_again(given_settings):
    torch.backends.fp32_precision = "ieee"
    run_in_fp32(lambda: None, tf32=True)
    torch.backends.fp32_precision = "tf32"
    assert MATMUL.fp32_precision == "tf32"


def test_tf32_is_scoped_even_when_runs_overlap():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    seen = []
    inside, leave = threading.Event(), threading.Event()

    def outer():
        inside.set()
        leave.wait(30)
        seen.append(matmul.fp32_precision)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_fp32, outer, tf32=True)
        assert inside.wait(30)
        run_in_fp32(lambda: seen.append(matmul.fp32_precision), tf32=True)
        assert matmul.fp32_precision == "tf32"
        leave.set()
        first.result()
    assert seen == ["tf32", "tf32"]
    assert matmul.fp32_precision == before
