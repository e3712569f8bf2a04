"""Every family in every state of its weights, with and without the guard: run in ComfyUI's interpreter, judged in
test_native_families.py."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import node, said
from native_models import LAYOUTS, Layout, in_fp32, make_model, sample

STATES = {  # dtype of the weights, and what they are cast to
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp16 computed in bf16": (torch.float16, torch.bfloat16),
    "fp32 computed in fp16": (torch.float32, torch.float16),
    "fp8 computed in fp16": (torch.float8_e4m3fn, torch.float16),
}
STEPS = 2
Figures = dict[str, Any]


def case_families() -> Figures:
    """By "family, state" and "family, state, overflowing". bf16 has fp32's range: what overflows it, fp32 does not
    mend."""
    found: Figures = {}
    for name, layout in LAYOUTS.items():
        for state, dtypes in STATES.items():
            make = partial(with_its_twin, layout, *dtypes)
            found[f"{name}, {state}"] = tried(healthy, layout, make)
            if "bf16" not in state:
                found[f"{name}, {state}, overflowing"] = tried(overflowing, layout, partial(make, hot=True))
    return found


def case_streams() -> Figures:
    """Of families with several streams: whether each is broken after one step of the one that overflows."""
    found: Figures = {}
    for name, layout in LAYOUTS.items():
        if len(layout.streams) > 1:
            plain = sample(make_model(layout, hot=True), layout, steps=1)
            found[name] = [not bool(stream.isfinite().all()) for stream in layout.split(plain)]
    return found


def case_inserted() -> Figures:
    """Of each family in fp16: whether a guard that 'Guard every workflow' inserted comes to what one comes to that was
    wired by hand, and what it says of a healthy run."""
    found: Figures = {}
    for name, layout in LAYOUTS.items():
        for hot in (False, True):
            patcher = make_model(layout, hot=hot)
            by_hand, _ = _guarded(patcher, layout, STEPS), said.clear()
            inserted = sample(node("model", patcher, inserted=True), layout, steps=STEPS)
            found[f"{name}, overflowing" if hot else name] = {"same": torch.equal(by_hand, inserted), "said": [*said]}
    return found


def case_about() -> Figures:
    lumina = import_module("comfy.ldm.lumina.model")
    version = import_module("comfyui_version").__version__
    return {
        "families": list(LAYOUTS),
        "version": version,
        "Lumina2 clips": hasattr(lumina, "clamp_fp16"),
        "fp16 intermediates": hasattr(import_module("comfy.cli_args").args, "fp16_intermediates"),
    }


def with_its_twin(
    layout: Layout, dtype: torch.dtype = torch.float16, compute: torch.dtype | None = None, *, hot: bool = False
) -> tuple[Any, Any]:
    """A model, and one with the same weights in fp32."""
    patcher = make_model(layout, dtype, compute, hot=hot)
    return patcher, in_fp32(patcher, layout)


def tried(measure: Callable[..., Figures], layout: Layout, make: Callable[[], tuple[Any, Any]]) -> Figures:
    """make: gives a model, and what its guarded runs have to come to. One family that fails leaves the others their
    figures."""
    try:
        return {"error": "", **measure(layout, *make())}
    except Exception:  # noqa: BLE001 - the test shows it
        return {"error": traceback.format_exc()}


def healthy(layout: Layout, patcher: Any, exact: Any, *, steps: int = STEPS) -> Figures:
    plain = sample(patcher, layout, steps=steps)
    guarded = _guarded(patcher, layout, steps)
    return {
        "plain": difference(layout, plain, sample(exact, layout, steps=steps)),
        "same": bool(plain.isfinite().all()) and torch.equal(plain, guarded),
        "reruns": _reruns(),
    }


def overflowing(layout: Layout, patcher: Any, exact: Any, *, steps: int = STEPS) -> Figures:
    plain = sample(patcher, layout, steps=steps)
    guarded, reruns = _guarded(patcher, layout, steps), _reruns()
    calls: list[int] = []
    block = exact.model.diffusion_model.get_submodule(layout.block)  # EasyCache skips it, not the network
    hook = block.register_forward_hook(lambda *_: calls.append(1))
    reference = sample(exact, layout, steps=steps)
    hook.remove()
    return {
        "plain": difference(layout, plain, reference),
        "guarded": difference(layout, guarded, reference),
        "calls": len(calls),
        "reruns": reruns,
    }


def _guarded(patcher: Any, layout: Layout, steps: int) -> torch.Tensor:
    said.clear()
    return sample(node("model", patcher), layout, steps=steps)


def _reruns() -> int:
    """That the guard reported."""
    found = re.search(r"(\d+) reruns?\b", said[-1])
    assert found, said[-1]
    return int(found[1])


def difference(layout: Layout, made: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest, as a share of the largest value, of the stream that has the largest. NaN where one has any."""
    streams = zip(layout.split(made.float()), layout.split(exact.float()), strict=True)
    shares = [(one - other).abs().max() / other.abs().max() for one, other in streams]
    return torch.stack(shares).max().item()
