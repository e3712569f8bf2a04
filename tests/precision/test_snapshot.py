"""Snapshots: a failed call changes nothing. The rerun is bit-equal to an fp32 model called from the same state, and
arguments, state and random numbers end as that call leaves them."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_onediff_guard.precision import snapshot
from comfyui_onediff_guard.precision.guard import GuardStopped, OnFailure, Scope
from comfyui_onediff_guard.precision.snapshot import Snapshot
from guards import guarded, outcomes
from host_reads import HostReads
from torch import nn

START = 0.5


class InSlots:
    __slots__ = ("__secret", "made")

    def __init__(self) -> None:
        self.made: torch.Tensor | None = None
        self.__secret = torch.full((4,), START)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.__secret += x.detach().float().reshape(-1, 4)[0]
        self.made = self.__secret * 1
        return self.__secret.to(x.dtype)


class Cache:
    """Keys stored on an object, as Qwen-Image 2.1 stores those of its prefix; with a reference to itself."""

    def __init__(self) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.itself = self

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.layers.setdefault(0, []).append(x)
        return torch.stack(self.layers[0]).sum(0)


class Remembers(nn.Module):
    """x [2, 4] → same shape. One of WRITES runs before a layer whose output overflows fp16 for large x."""

    total: torch.Tensor

    def __init__(self, write: Any):
        super().__init__()
        self.write = write
        self.register_buffer("total", torch.full((4,), START))
        self.inner = nn.Module()
        self.inner.seen = []
        self.calls, self.cached = 0, None
        self.kept: Any = {"sum": torch.zeros(2, 4), "nested": [{"n": 0}], "set": set(), "queue": deque(maxlen=2)}
        self.kept["ordered"] = OrderedDict(first=0)
        self.cache, self.slots = Cache(), InSlots()
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.array, self.numpy = np.full(4, START), [np.random.default_rng(3), np.random.RandomState(3)]
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        made = self.write(self, x, given)
        return self.layer(made.to(x.dtype)) * (1000 * x.detach().abs().amax())


Write = Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]  # module, its input, its other arguments


def popped(_: Any, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    given["list"].append(0)
    return x * given.pop("scale") * len(given["list"])


def expanded(_: Any, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    given["base"].add_(1)
    return x * given["expanded"].to(x.dtype)


def new_buffer(self: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
    self.total = self.total + 1
    return x * self.total


def attributes(self: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
    self.calls += 1
    self.inner.seen.append(x)
    return x * self.calls * len(self.inner.seen)


def first_call(self: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
    if self.cached is None:
        self.cached, self.pair = x * 3, (x * 5,)
        self.inner.late = 1
    return x + self.cached + self.pair[0]


def containers(self: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
    self.kept["sum"].add_(x.float())
    self.kept["nested"][0]["n"] += 1
    self.kept["set"].add(len(self.kept["set"]))
    self.kept["queue"].append(self.calls)
    self.kept["ordered"][self.calls, len(self.kept["ordered"])] = 1
    times = self.kept["nested"][0]["n"] * len(self.kept["set"]) * len(self.kept["queue"])
    return x * times * len([*self.kept["ordered"]]) + self.kept["sum"]


def array(self: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
    self.array += 1
    return x * float(self.array[0])


def in_float(drawn: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return drawn.float().to(x.dtype)


WRITES: dict[str, Write] = {
    "argument": lambda _, x, __: x.mul_(2),
    "argument in place": lambda _, x, __: x.t_().mul_(2).t_() * 1,
    "popped": popped,
    "inside an argument": lambda _, x, given: x * given["tensors"][0].add_(1).to(x.dtype),
    "expanded": expanded,
    "buffer": lambda self, x, _: x + self.total.add_(x.detach()[0]),
    "new buffer": new_buffer,
    "attributes": attributes,
    "first call": first_call,
    "containers": containers,
    "on an object": lambda self, x, _: self.cache.add(x),
    "in slots": lambda self, x, _: self.slots.add(x) * x,
    "an array": array,
    "global random": lambda _, x, __: x * in_float(torch.rand(4, dtype=torch.float64), x) + random.random(),
    "own random": lambda self, x, _: (
        x * in_float(torch.rand(4, generator=self.generator, dtype=torch.float64), x) + self.python.random()
    ),
    "NumPy's random": lambda self, x, _: x + sum(each.uniform() for each in self.numpy),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
in_each_mode = pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])


def built(write: Any) -> Remembers:
    torch.manual_seed(0)
    return Remembers(write).half().requires_grad_(False)


def make_arguments() -> dict[str, Any]:
    base = torch.ones(1)
    return {"scale": 3.0, "list": [], "tensors": (torch.ones(4),), "base": base, "expanded": base.expand(4)}


def latents(scale: float = 100.0) -> torch.Tensor:
    return scale * torch.randn((2, 4), generator=torch.Generator().manual_seed(1)).half()


def state(module: Any, arguments: Any) -> Any:
    """The values that a call may have changed."""
    kept = {**module.kept, "queue": [[*module.kept["queue"]], [*module.kept["ordered"].items()]]}
    tensors = [module.total, module.kept["sum"], module.cached, getattr(module, "pair", None), module.cache.layers]
    tensors += [module._buffers, module.slots._InSlots__secret, module.slots.made, module.inner.seen, arguments]
    plain = [module.calls, kept["nested"], kept["set"], kept["queue"], vars(module.inner).get("late")]
    drawn = [random.random(), module.python.random(), *(each.uniform() for each in module.numpy), *module.array]
    drawn += [torch.rand(1), torch.rand(1, generator=module.generator)]
    leaves = torch.utils._pytree.tree_leaves((tensors, plain, drawn))
    return [leaf.float() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)  # fp16 values are rounded
        else:
            assert ours == theirs


@in_each_mode
@each_write
def test_rerun_starts_from_the_state_before_the_failed_call(write: Any, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        module = built(write)
        right, run = copy.deepcopy(module).float(), guarded(module, scope=Scope.STEP)
        for call, scale in enumerate((100.0, 0.01, 50.0)):  # the second is healthy and continues from the first
            ours, theirs, x, alike = make_arguments(), make_arguments(), latents(scale), latents(scale).float()
            torch.manual_seed(call)
            random.seed(call)
            found = run(x, given=ours)
            after = state(module, (x, ours))
            torch.manual_seed(call)
            random.seed(call)
            expected = right(alike, given=theirs)
            assert_alike(after, state(right, (alike, theirs)))
            if call == 0:
                assert torch.equal(found, expected)
            assert (found - expected).norm() <= 2e-3 * expected.norm()
    assert outcomes(run) == ["rerun", "finite", "rerun"]


@each_write
@pytest.mark.parametrize("how", ["stop", "raise", "broken in fp32"])
@torch.no_grad()
def test_call_that_ends_in_an_error_leaves_state_unchanged(write: Any, how: str) -> None:
    module, x, ours = built(write), latents(), make_arguments()
    torch.manual_seed(0)
    random.seed(0)
    expected = state(copy.deepcopy(module), (latents(), make_arguments()))
    if how == "broken in fp32":
        module.layer.bias[0] = torch.nan
    module.layer.register_forward_hook(lambda *_: 1 / (how != "raise") and None)
    torch.manual_seed(0)
    random.seed(0)
    with pytest.raises(ZeroDivisionError if how == "raise" else GuardStopped):
        guarded(module, on_failure=OnFailure.STOP if how == "stop" else OnFailure.RERUN)(x, given=ours)
    assert_alike(state(module, (x, ours)), expected)


@in_each_mode
def test_changed_tensor_too_large_to_copy_stops_the_run(inference, monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED", 8)
    with torch.inference_mode(inference), torch.no_grad():
        with pytest.raises(GuardStopped, match="has overwritten '0'"):
            guarded(built(WRITES["argument"]))(latents(), given=make_arguments())
        run = guarded(built(lambda _module, x, _given: x * 2))
        run(latents(), given=make_arguments())
    assert outcomes(run) == ["rerun"], "no tensor too large to copy has changed"


@torch.no_grad()
def test_cast_arguments_of_the_caller_are_unchanged() -> None:
    module, x = built(WRITES["argument"]), latents().float()
    guarded(module, inputs=("x",))(x=x, given=make_arguments())
    assert torch.equal(x, latents().float())


@in_each_mode
@pytest.mark.parametrize("write", [lambda _: None, lambda x: x.mul_(2), lambda x: x.resize_(2)])
def test_restore_can_skip_waiting_for_the_device(write: Any, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        x = torch.arange(6.0)
        before, reads = Snapshot((x,), {}), HostReads()
        write(x)
        reads.mark(x)
        with reads:
            before.restore(waits=False)
        assert torch.equal(x, torch.arange(6.0)) and not +reads.reads
        with reads:
            before.restore()
        assert +reads.reads, "by default it waits"


def test_numpy_array_is_restored_without_waiting() -> None:
    x = np.arange(6.0)
    before = Snapshot((x,), {})
    x += 1
    before.restore(waits=False)
    assert np.array_equal(x, np.arange(6.0))


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own quantised kinds are deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_takes_every_kind_of_tensor(kind: str) -> None:
    kept = {"kind": KINDS[kind](), "plain": torch.ones(2)}
    found = Snapshot(kept)
    if kept["kind"].is_complex():
        kept["kind"].zero_()
    kept["plain"].zero_()
    assert found.restore() == found.first_nan() == ""
    assert kept["plain"].all() and (not kept["kind"].is_complex() or kept["kind"].all())


def test_unchanged_tensors_are_not_written_and_weights_not_copied() -> None:
    module = built(WRITES["buffer"])
    found = Snapshot(module)
    names = {each.path[-1] for each in found._tensors}
    assert "total" in names and not names & {"weight", "bias"}
    assert found.restore() == "" and module.total._version == 0


@pytest.mark.parametrize("opaque", [(), (f"{__name__}.",)])
def test_subclass_of_an_opaque_class_is_opaque(opaque: tuple[str, ...]) -> None:
    """Like ComfyUI's ModelPatcher, which Qwen-Image 2.1's network holds: it has all LoRA weights."""
    elsewhere = type("Elsewhere", (Cache,), {"__module__": "elsewhere"})()
    elsewhere.layers[0] = [torch.zeros(4)]
    assert len(Snapshot(elsewhere, opaque=opaque)._tensors) == (0 if opaque else 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_nan_in_kept_state_is_named_after_the_call_cleared_it(dtype: torch.dtype) -> None:
    module = built(WRITES["buffer"])
    module.cache.layers[0] = [torch.ones(2).to(dtype)]
    assert Snapshot(module).first_nan() == ""
    module.cache.layers[0] = [torch.full((2,), torch.nan).to(dtype)]
    before = Snapshot(module)
    module.cache.layers.clear()
    assert before.first_nan() == "cache.layers.0.0"


def test_nan_in_state_too_large_to_copy_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "COPIED", 4)
    module = built(WRITES["buffer"])
    module.cache.layers[0] = [torch.ones(64)]
    before = Snapshot(module)
    module.cache.layers[0][0].fill_(torch.nan)
    assert before.first_nan() == ""


def test_snapshot_frees_tensors_without_garbage_collection():
    """Waiting would keep device memory."""
    given = torch.zeros(4)
    seen = weakref.ref(given)
    gc.collect()
    gc.disable()
    try:
        before = Snapshot((given, {"more": [given]}), torch.nn.Linear(2, 2))
        before.restore()
        before.dtypes_now()
        del before, given
        assert seen() is None
    finally:
        gc.enable()


class Keeper:
    def __init__(self) -> None:
        self.kept = [torch.zeros(2)]

    def keep(self, x: torch.Tensor) -> None:
        self.kept.append(x)
        self.kept[0].add_(1)


def test_state_in_functions_and_methods_is_restored_if_requested() -> None:
    keeper, counts, large = Keeper(), {"calls": 0}, torch.zeros(2**23 + 1)
    last: torch.Tensor | None = None

    def keep(x: torch.Tensor) -> None:
        nonlocal last
        last = x
        counts["calls"] += 1
        large.add_(1)

    def run(*, in_functions: bool) -> tuple[int, Any, int, float]:
        roots: list[Any] = [{"patches": [keep, keeper.keep, [partial(keep)]]}]
        before = Snapshot(*roots, in_functions=in_functions)
        for function in (keep, keeper.keep):
            function(torch.ones(2))
        before.restore()
        return counts["calls"], last, len(keeper.kept), keeper.kept[0].sum().item()

    assert run(in_functions=True) == (0, None, 1, 0.0) and large.any()  # too large to copy for each call
    assert run(in_functions=False)[0] == 1 and len(keeper.kept) == 2


def test_container_too_large_to_inspect_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyui_onediff_guard.precision.snapshot._Reachable._left", 50)
    large, small = {number: number for number in range(100)}, {"a": 1}
    before = Snapshot(large, small)
    small["a"] = 2
    before.restore()
    assert small == {"a": 1}
