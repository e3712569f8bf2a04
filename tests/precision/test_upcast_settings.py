"""PyTorch's process-wide settings while a rerun holds TF32, and what PyTorch says of its devices."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.fp32_settings import TF32
from comfyui_onediff_guard.precision.guard import GuardPolicy, StageGuard
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from torch import nn

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


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("by_whom", BY_WHOM)
def test_tf32_mixes_no_old_and_new_settings_and_leaves_them_as_they_were(by_whom, on, given_settings):
    BY_WHOM[by_whom]()
    before = settings()
    with ThreadPoolExecutor(1) as pool:
        here, there = run_in_fp32(lambda: (settings(), pool.submit(settings).result()), tf32=on)
    assert here == there
    assert (here["matmul"] == "tf32", here["convolutions"] == "tf32") == (on, on)
    raising = {name for name, value in here.items() if value == "raises"}
    assert raising <= {name for name, value in before.items() if value == "raises"}, "none that did not before"
    assert settings() == before


def test_a_setting_that_was_inherited_is_inherited_again(given_settings):
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
def test_it_is_scoped_and_plain_fp32_wins_where_runs_overlap(first, second, seen, given_settings):
    inside, leave, found = threading.Event(), threading.Event(), []

    def read():
        return found.append(CUDNN.conv.fp32_precision)

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
    assert found == seen.split()


@pytest.mark.parametrize(("dtype", "strict", "seen"), [
    ("fp32", True, "none"),
    ("fp32", False, "tf32"),
    ("fp16", True, "tf32"),
    ("fp16", False, "tf32"),
])  # fmt: skip
def test_a_model_in_fp32_keeps_from_it_where_the_policy_is_strict(dtype, strict, seen, given_settings):
    """Not its reruns alone."""
    plan = choose(ARCHITECTURES["cpu"], VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision(dtype))
    found, before = [], settings()

    def called(given):
        found.append(CUDNN.conv.fp32_precision)
        return given

    policy = GuardPolicy(strict=strict)
    StageGuard("denoiser", called, dtype=dtype, policy=policy, report=RunReport("", "", plan))(torch.ones(2))
    assert (found, settings()) == ([seen], before)


def test_it_is_put_back_whoever_leaves_last(given_settings):
    for order in itertools.permutations((True, False, True)):
        before, stacks = settings(), [ExitStack() for _ in order]
        for stack, allowed in zip(stacks, order, strict=True):
            stack.enter_context(TF32.held(allowed))
        for stack in stacks:
            stack.close()
        assert settings() == before


def test_pytorch_2_6_raises_where_there_is_no_accelerator(monkeypatch):
    def none_available():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none_available)
    layer = nn.Linear(4, 4).half()
    assert torch.equal(run_in_fp32(layer, torch.ones(1, 4)), copy.deepcopy(layer).float()(torch.ones(1, 4)))
