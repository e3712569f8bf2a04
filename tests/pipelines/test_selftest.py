"""Each line of the self-test is right on this machine, and wrong where what it checks is broken."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice
from comfyui_onediff_guard.pipelines.insight import selftest as module
from comfyui_onediff_guard.pipelines.insight.selftest import Line, selftest
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
LAYERS = {"matrix product": F.linear, "2D convolution": F.conv2d, "3D convolution": F.conv3d}
KINDS = {**LAYERS, "attention": F.scaled_dot_product_attention}


class Broken(TorchFunctionMode):
    """A kernel that loses digits in one dtype, where it is given enough to add up."""

    def __init__(self, func: Any, dtype: torch.dtype, addends: int = 0):
        super().__init__()
        self._func, self._dtype, self._addends = func, dtype, addends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        broken = func is self._func and args[0].dtype is self._dtype and args[0].shape[-1] >= self._addends
        return made * (1 + 2**-6) if broken else made


# inductor's code for fp16 does not compile where this is set: PyTorch's headers leave its vectors out
NO_COMPILER = ["a compiled block"] if os.environ.get("ATEN_CPU_CAPABILITY") == "default" else []


def line(found: tuple[Line, ...], name: str) -> Line:
    return next(each for each in found if each.name == name)


def test_all_is_right_here() -> None:
    told: list[str] = []
    found = selftest(CPU, told.append)
    assert [each for each in found.lines if each.verdict != "right" and each.name not in NO_COMPILER] == []
    assert [each.name for each in found.lines] == told[:-1] and told[-1] == "times"
    assert len(found.lines) == 20 and all(seconds > 0 for seconds in found.seconds.values())
    assert len(found.seconds) >= 3 and found.machine["torch"] == torch.__version__


def with_backend(reason: str) -> Callable[..., Any]:
    return lambda *_: BackendChoice(EAGER, reason)


BREAKS: dict[str, Any] = {
    **{f"{kind} in {name}": Broken(func, dtype) for kind, func in KINDS.items()
       for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))},
    **{f"{kind} in fp32, without TF32": Broken(func, torch.float32) for kind, func in KINDS.items()},
    **{f"{kind} in fp16, scaled": Broken(func, torch.float16) for kind, func in KINDS.items()},
    "the accumulation switches": Broken(F.linear, torch.float16, 16384),
    "a call that overflows, computed again in fp32": Broken(F.linear, torch.float32),
    "a residual stream in float32, beyond fp16": Broken(F.layer_norm, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_line_is_wrong_where_what_it_checks_is_broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "_times", lambda *_: ())
    monkeypatch.setattr(module, "choose_backend", with_backend("not tried here"))
    with BREAKS[name]:
        found = selftest(CPU)
    assert line(found.lines, name).verdict == "wrong" and line(found.lines, name) in found.wrong
    assert line(found.lines, "a compiled block") == Line("a compiled block", "not run", note="not tried here")


@pytest.mark.parametrize(
    ("name", "part", "stand_in", "note"),
    [
        (
            "a call that overflows, computed again in fp32",
            "StageGuard",
            lambda _stage, network, **_: network,
            "ValueError: the guard did not see the overflow",
        ),
        ("a residual stream in float32, beyond fp16", "with_wide_stream", lambda network, *_: network, ""),
        ("a compiled block", "compiled", lambda network, *_, **__: network.float(), "RuntimeError"),
        ("a compiled block", "compiled", lambda *_, **__: lambda x: x.mul(3), ""),
    ],
)
def test_a_part_of_the_pack_that_does_nothing_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, part: str, stand_in: Any, note: str
) -> None:
    monkeypatch.setattr(module, "_times", lambda *_: ())
    if name != "a compiled block":
        monkeypatch.setattr(module, "choose_backend", with_backend("not tried here"))
    monkeypatch.setattr(module, part, stand_in)
    found = line(selftest(CPU).lines, name)
    assert found.verdict == "wrong" and found.note.startswith(note)


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """'auto' goes on without it, so nothing that was compiled is right or wrong."""

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(module, "_times", lambda *_: ())
    monkeypatch.setattr(backends, "_compile", failing)
    found = line(selftest(CPU).lines, "a compiled block")
    assert found.verdict == "not run" and "no ptxas" in found.note


def test_a_kernel_that_raises_costs_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device\nCUDA kernel errors …")

    monkeypatch.setattr(module, "_times", lambda *_: ())
    monkeypatch.setattr(module, "choose_backend", with_backend("not tried here"))
    monkeypatch.setitem(module.OPERATIONS, "attention", (no_kernel, module.OPERATIONS["attention"][1]))  # pyright: ignore[reportArgumentType]
    found = selftest(CPU)
    assert {each.name.partition(" ")[0] for each in found.wrong} == {"attention"}
    assert line(found.lines, "attention in fp16").note.endswith(
        "no kernel image is available for execution on the device"
    )
