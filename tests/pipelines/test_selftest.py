"""Each check of the self-test passes on this machine, and fails if what it checks is broken."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.errors import DeviceGone
from comfyui_onediff_guard.pipelines.selftest import checks as module
from comfyui_onediff_guard.pipelines.selftest.checks import selftest
from comfyui_onediff_guard.precision.arch import COMPILED, detect
from comfyui_onediff_guard.precision.self_test import CheckResult
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Only = Callable[..., tuple[CheckResult, ...]]
CPU = torch.device("cpu")
LAYERS = {"matrix product": F.linear, "2D convolution": F.conv2d, "3D convolution": F.conv3d}
KINDS = {**LAYERS, "attention": F.scaled_dot_product_attention}


class Broken(TorchFunctionMode):
    """A kernel that loses digits in one dtype, if it adds up at least `addends` values."""

    def __init__(self, func: Any, dtype: torch.dtype, addends: int = 0):
        super().__init__()
        self._func, self._dtype, self._addends = func, dtype, addends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        broken = func is self._func and args[0].dtype is self._dtype and args[0].shape[-1] >= self._addends
        return made * (1 + 2**-6) if broken else made


# if this is set, inductor's code for fp16 does not compile: PyTorch's headers lack its vectors
NO_COMPILER = ["a compiled block"] if os.environ.get("ATEN_CPU_CAPABILITY") == "default" else []
ONLY_ON_GPU = ["offload 'group'", "peak memory beyond the estimate"]  # devices/on_it/device_itself.py has them


def test_all_checks_pass_on_cpu() -> None:
    progress: list[tuple[str, int, int]] = []
    found = selftest(CPU, lambda *call: progress.append(call))
    assert [each.name for each in found.lines if each.verdict != "right"] in (ONLY_ON_GPU, [*NO_COMPILER, *ONLY_ON_GPU])
    assert progress == [(name, i, 23) for i, name in enumerate([*(each.name for each in found.lines), "times"])]
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert len(found.seconds) >= 6 and found.machine["torch"] == torch.__version__


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Only:
    """only(name, …) runs these checks without timings, and returns their results."""
    every = module._checks

    def run(*names: str) -> tuple[CheckResult, ...]:
        with monkeypatch.context() as patched:
            patched.setattr(module, "_checks", lambda card: [each for each in every(card) if each.name in names])
            patched.setattr(module, "_times", lambda *_: ())
            return selftest(CPU).lines

    return run


BREAKS: dict[str, Any] = {
    **{f"{kind} in {name}": Broken(func, dtype) for kind, func in KINDS.items()
       for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))},
    **{f"{kind} in fp32, without TF32": Broken(func, torch.float32) for kind, func in KINDS.items()},
    **{f"{kind} in fp16, scaled": Broken(func, torch.float16) for kind, func in KINDS.items()},
    "the accumulation switches": Broken(F.linear, torch.float16, 16384),
    "a call that overflows, recomputed in fp32": Broken(F.linear, torch.float32),
    "overflow protection, beyond fp16": Broken(F.layer_norm, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_check_fails_if_kernel_that_it_checks_is_broken(only: Only, name: str) -> None:
    with BREAKS[name]:
        (found,) = only(name)
    assert found.verdict == "wrong" and (found.concern in name or found.concern == "fp16")


def without_its_first_block(network: torch.nn.Module, parts: tuple[str, ...], *_: Any, **__: Any) -> torch.nn.Module:
    """As compiled code that skips what a block computes."""
    made = copy.deepcopy(network)
    for weight in next(made.get_submodule(parts[0]).children()).parameters():
        weight.data.zero_()
    return made


RECOMPUTED, PROTECTED = "a call that overflows, recomputed in fp32", "overflow protection, beyond fp16"
NOT_SEEN = "ValueError: the guard did not see the overflow"


@pytest.mark.parametrize(
    ("name", "part", "stand_in", "note"),
    [
        (RECOMPUTED, "StageGuard", lambda _stage, network, **_: network, NOT_SEEN),
        (PROTECTED, "LearnedProducts", lambda: SimpleNamespace(run=lambda network, x: network(x)), ""),
        ("a compiled block", "compiled", lambda network, *_, **__: network.float(), "RuntimeError"),
        ("a compiled block", "compiled", lambda *_, **__: lambda x: x.mul(3), ""),
        ("a compiled block", "compiled", without_its_first_block, ""),
    ],
)
def test_check_fails_if_part_of_pack_does_nothing(
    monkeypatch: pytest.MonkeyPatch, only: Only, name: str, part: str, stand_in: Any, note: str
) -> None:
    monkeypatch.setattr(module, part, stand_in)
    (found,) = only(name)
    assert found.verdict == "wrong" and found.note.startswith(note)


def test_failing_compiler_is_noted_and_check_not_run(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    """'auto' falls back to eager, so compiled code is neither right nor wrong."""
    monkeypatch.setattr(backends, "_compile", Mock(side_effect=RuntimeError("no ptxas")))
    (found,) = only("a compiled block")
    assert found.verdict == "not run" and "no ptxas" in found.note and found.concern == COMPILED


def test_kernel_that_raises_fails_only_its_own_checks(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    error = RuntimeError("no kernel image is available for execution on the device\nCUDA kernel errors …")
    no_kernel = Mock(side_effect=error)
    monkeypatch.setitem(module.OPERATIONS, "attention", (no_kernel, module.OPERATIONS["attention"][1]))
    found = only("attention in fp16", "matrix product in fp16", "attention in fp16, scaled")
    assert [each.verdict for each in found] == ["right", "wrong", "wrong"]
    assert found[1].note.endswith("no kernel image is available for execution on the device")


def test_check_without_enough_memory_counts_as_not_run(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB."))
    monkeypatch.setitem(module.OPERATIONS, "attention", (full, module.OPERATIONS["attention"][1]))
    monkeypatch.setattr(module.LearnedProducts, "run", full)
    (found,) = only("attention in fp16")
    timed = dict(module._times(CPU, detect(CPU)))
    assert found.verdict == "not run" and timed and [each for each in timed if "protected" in each] == []
    assert found.note.startswith("too little memory is free: OutOfMemoryError: CUDA out")


def test_lost_device_ends_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors …"))
    monkeypatch.setitem(module.OPERATIONS, "2D convolution", (gone, module.OPERATIONS["2D convolution"][1]))
    asked = iter([torch.ones(1)] * 4)  # one after each check of products, then none
    monkeypatch.setattr(module.torch, "zeros", lambda *_, **__: next(asked, None) or gone())
    with pytest.raises(DeviceGone, match=r"after the check '2D convolution in fp16' .*unspecified launch"):
        selftest(CPU)
