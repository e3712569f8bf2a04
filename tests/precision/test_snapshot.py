"""A call that fails leaves nothing behind: the rerun has the bits of the model in fp32, called from the same state, and
arguments, state and random numbers end where that call leaves them."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

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
    """Keys that are kept on an object, as Qwen-Image 2.1 keeps those of its prefix; and a way back to itself."""

    def __init__(self) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.itself = self

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.layers.setdefault(0, []).append(x)
        return torch.stack(self.layers[0]).sum(0)


class Remembers(nn.Module):
    """x [2, 4] → the same. One of `Writes` runs before a layer whose result leaves fp16's range where x is large."""

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
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        made = self.write(self, x, given)
        return self.layer(made.to(x.dtype)) * (1000 * x.detach().abs().amax())


Write = Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]  # a module, its input, and what else it is given


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


def in_float(drawn: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return drawn.float().to(x.dtype)


WRITES: dict[str, Write] = {
    "argument": lambda _, x, __: x.mul_(2),
    "argument in place": lambda _, x, __: x.t_().mul_(2).t_() * 1,
    "popped": popped,
    "inside what is given": lambda _, x, given: x * given["tensors"][0].add_(1).to(x.dtype),
    "expanded": expanded,
    "buffer": lambda self, x, _: x + self.total.add_(x.detach()[0]),
    "new buffer": new_buffer,
    "attributes": attributes,
    "first call": first_call,
    "containers": containers,
    "on an object": lambda self, x, _: self.cache.add(x),
    "in slots": lambda self, x, _: self.slots.add(x) * x,
    "global random": lambda _, x, __: x * in_float(torch.rand(4, dtype=torch.float64), x) + random.random(),
    "own random": lambda self, x, _: (
        x * in_float(torch.rand(4, generator=self.generator, dtype=torch.float64), x) + self.python.random()
    ),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
in_each_mode = pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])


def built(write: Any) -> Remembers:
    torch.manual_seed(0)
    return Remembers(write).half().requires_grad_(False)


def given() -> dict[str, Any]:
    base = torch.ones(1)
    return {"scale": 3.0, "list": [], "tensors": (torch.ones(4),), "base": base, "expanded": base.expand(4)}


def latents(scale: float = 100.0) -> torch.Tensor:
    return scale * torch.randn((2, 4), generator=torch.Generator().manual_seed(1)).half()


def state(module: Any, arguments: Any) -> Any:
    """All that a call may have changed, as values."""
    kept = {**module.kept, "queue": [[*module.kept["queue"]], [*module.kept["ordered"].items()]]}
    tensors = [module.total, module.kept["sum"], module.cached, getattr(module, "pair", None), module.cache.layers]
    tensors += [module._buffers, module.slots._InSlots__secret, module.slots.made, module.inner.seen, arguments]
    plain = [module.calls, kept["nested"], kept["set"], kept["queue"], vars(module.inner).get("late")]
    drawn = [random.random(), module.python.random()]
    drawn += [torch.rand(1), torch.rand(1, generator=module.generator)]
    leaves = torch.utils._pytree.tree_leaves((tensors, plain, drawn))
    return [leaf.float() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)  # what stays in fp16 is rounded there
        else:
            assert ours == theirs


@in_each_mode
@each_write
def test_a_rerun_starts_from_what_the_failed_call_started_from(write: Any, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        module = built(write)
        right, run = copy.deepcopy(module).float(), guarded(module, scope=Scope.STEP)
        for call, scale in enumerate((100.0, 0.01, 50.0)):  # the second one is healthy, and goes on from the first
            ours, theirs, x, alike = given(), given(), latents(scale), latents(scale).float()
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
def test_a_call_that_ends_in_an_error_leaves_nothing(write: Any, how: str) -> None:
    module, x, ours = built(write), latents(), given()
    torch.manual_seed(0)
    random.seed(0)
    expected = state(copy.deepcopy(module), (latents(), given()))
    if how == "broken in fp32":
        module.layer.bias[0] = torch.nan
    module.layer.register_forward_hook(lambda *_: 1 / (how != "raise") and None)
    torch.manual_seed(0)
    random.seed(0)
    with pytest.raises(ZeroDivisionError if how == "raise" else GuardStopped):
        guarded(module, on_failure=OnFailure.STOP if how == "stop" else OnFailure.RERUN)(x, given=ours)
    assert_alike(state(module, (x, ours)), expected)


@in_each_mode
def test_what_is_too_large_to_be_copied_ends_the_run_where_it_changed(inference, monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED", 8)
    with torch.inference_mode(inference), torch.no_grad():
        with pytest.raises(GuardStopped, match="had overwritten '0'"):
            guarded(built(WRITES["argument"]))(latents(), given=given())
        run = guarded(built(lambda _module, x, _given: x * 2))
        run(latents(), given=given())
    assert outcomes(run) == ["rerun"], "nothing that is too large has changed"


@torch.no_grad()
def test_arguments_that_half_precision_is_given_a_cast_of_stay_the_callers() -> None:
    module, x = built(WRITES["argument"]), latents().float()
    guarded(module, inputs=("x",))(x=x, given=given())
    assert torch.equal(x, latents().float())


@in_each_mode
@pytest.mark.parametrize("write", [lambda _: None, lambda x: x.mul_(2), lambda x: x.resize_(2)])
def test_what_changed_is_put_back_without_waiting_for_the_device(write: Any, inference: bool) -> None:
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
        assert +reads.reads, "which it does by default"


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


def test_what_did_not_change_is_not_touched_and_weights_are_not_copied() -> None:
    module = built(WRITES["buffer"])
    found = Snapshot(module)
    names = {each.path[-1] for each in found._tensors}
    assert "total" in names and not names & {"weight", "bias"}
    assert found.restore() == "" and module.total._version == 0


@pytest.mark.parametrize("opaque", [(), (f"{__name__}.",)])
def test_what_derives_from_an_opaque_class_is_opaque_too(opaque: tuple[str, ...]) -> None:
    """As another pack's ModelPatcher, which Qwen-Image 2.1's network holds: it has all weights of LoRAs."""
    elsewhere = type("Elsewhere", (Cache,), {"__module__": "elsewhere"})()
    elsewhere.layers[0] = [torch.zeros(4)]
    assert len(Snapshot(elsewhere, opaque=opaque)._tensors) == (0 if opaque else 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_nan_that_was_kept_is_named_though_the_call_has_overwritten_it(dtype: torch.dtype) -> None:
    module = built(WRITES["buffer"])
    module.cache.layers[0] = [torch.ones(2).to(dtype)]
    assert Snapshot(module).first_nan() == ""
    module.cache.layers[0] = [torch.full((2,), torch.nan).to(dtype)]
    before = Snapshot(module)
    module.cache.layers.clear()
    assert before.first_nan() == "cache.layers.0.0"


def test_nothing_is_said_of_what_was_too_large_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "COPIED", 4)
    module = built(WRITES["buffer"])
    module.cache.layers[0] = [torch.ones(64)]
    before = Snapshot(module)
    module.cache.layers[0][0].fill_(torch.nan)
    assert before.first_nan() == ""


def test_nothing_of_a_call_waits_for_the_garbage_collector():
    """It would hold a device's memory."""
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


def test_what_functions_and_methods_keep_is_put_back_where_they_are_looked_into() -> None:
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

    assert run(in_functions=True) == (0, None, 1, 0.0) and large.any()  # too large to be copied with each call
    assert run(in_functions=False)[0] == 1 and len(keeper.kept) == 2


def test_a_container_that_is_too_large_to_be_looked_at_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyui_onediff_guard.precision.snapshot._Reachable._left", 50)
    large, small = {number: number for number in range(100)}, {"a": 1}
    before = Snapshot(large, small)
    small["a"] = 2
    before.restore()
    assert small == {"a": 1}
