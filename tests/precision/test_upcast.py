"""The fp32 rerun: bit-equal to module.float(), and nothing left behind."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

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
        with module.fp32_mode(module.Fp32Mode(), tf32=False):
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
