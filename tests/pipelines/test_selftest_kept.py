"""Saved results of the self-test: later runs on the same card avoid what was wrong, and say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.native_network import comfy_plan
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, for_dtype
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, COMPILED, Architecture, detect
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.self_test import CheckResult, machine_of, verified_architecture
from self_tests import DAY, keep_self_test

CPU = torch.device("cpu")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def with_failed(name: str, *failed: str) -> Architecture:
    return replace(ARCHITECTURES[name], tested=DAY, failed=failed)


@pytest.mark.parametrize(
    ("card", "model", "failed", "expected"),
    [
        ("sm90", "CogVideoX-5B", (), "bf16"),
        ("sm90", "CogVideoX-5B", ("bf16",), "fp16"),
        ("sm90", "CogVideoX-5B", ("bf16", "fp16"), "fp32"),
        ("sm90", "CogVideoX-5B", ("fp16", COMPILED), "bf16"),
        ("sm90", "CogVideoX-2B", ("fp16",), "bf16"),
        ("sm75", "CogVideoX-2B", ("fp16",), "fp32"),
        ("sm75", "CogVideoX-5B", ("bf16",), "fp16"),
        ("sm61", "SVD", ("fp32",), "fp32"),
        ("sm90", "SVD", ("fp16", "bf16", "fp32"), "fp32"),
    ],
)
def test_auto_avoids_failed_dtypes(card: str, model: str, failed: tuple[str, ...], expected: str) -> None:
    plan = choose(with_failed(card, *failed), VARIANTS[model], Component.DENOISER, Precision.AUTO)
    before = choose(ARCHITECTURES[card], VARIANTS[model], Component.DENOISER, Precision.AUTO)
    instead = f"{expected}, since {before.dtype} failed this card's self-test of {DAY}"
    why = before.reason if expected == before.dtype else instead
    also = f", but {expected} failed this card's self-test of {DAY}" if expected in failed else ""
    assert (plan.dtype, plan.reason) == (expected, why + also)
    assert plan.overflow_protection == (expected == "fp16" and VARIANTS[model].protected)


@pytest.mark.parametrize("request_", [Precision.BF16, Precision.FP16, Precision.FP32, Precision.INT8])
def test_chosen_precision_is_used_and_its_reason_warns(request_: Precision) -> None:
    plan = choose(with_failed("sm90", *HALVES), VARIANTS["CogVideoX-2B"], Component.DENOISER, request_)
    assert plan == replace(
        choose(ARCHITECTURES["sm90"], VARIANTS["CogVideoX-2B"], Component.DENOISER, request_), reason=plan.reason
    )
    assert plan.reason.endswith(f", but {plan.dtype} failed this card's self-test of {DAY}")


@pytest.mark.parametrize(
    ("chosen", "request_", "failed", "expected", "protected"),
    [
        ("bf16", Precision.AUTO, ("bf16",), "fp16", True),
        ("bf16", Precision.AUTO, ("bf16", "fp16"), "fp32", False),
        ("fp16", Precision.AUTO, ("bf16",), "fp16", False),
        ("bf16", None, ("bf16",), "bf16", False),
    ],
)
def test_native_models_avoid_failed_dtypes(
    chosen: str, request_: Precision | None, failed: tuple[str, ...], expected: str, protected: bool
) -> None:
    plan = comfy_plan(Component.DENOISER, "Lumina2", HALVES[chosen], with_failed("sm90", *failed), request_)
    assert not plan.fp16_sums, "nobody asked for them"
    assert (plan.dtype, plan.overflow_protection) == (expected, protected)
    assert ("self-test" in plan.reason) == (chosen in failed)


def test_backend_that_failed_self_test_is_used_only_if_chosen() -> None:
    card = with_failed("sm90", COMPILED)
    by_itself = for_dtype(BackendChoice("inductor", "auto: first choice", automatic=True), card, "fp16")
    chosen_by_user = BackendChoice("inductor", "as you chose")
    assert by_itself.name == "eager" and by_itself.reason == (
        f"auto: inductor is available, but compiled code failed this card's self-test of {DAY}"
    )
    assert for_dtype(chosen_by_user, card, "fp16") is chosen_by_user


def test_result_applies_only_to_same_card_driver_and_pytorch(tmp_path: Path) -> None:
    assert (
        verified_architecture(CPU, None)
        == verified_architecture(CPU, tmp_path)
        == verified_architecture(CPU, tmp_path / "none")
        == detect(CPU)
    )
    wrong = CheckResult("attention in fp16", "wrong", 1.0, 0.1, concern="fp16")
    for fact in machine_of(CPU, detect(CPU)):
        keep_self_test(tmp_path, wrong, **{fact: "another"})
        assert verified_architecture(CPU, tmp_path) == detect(CPU), fact
    keep_self_test(
        tmp_path, wrong, CheckResult("a product", "right", concern="bf16"), CheckResult("offload", "wrong"), wrong
    )
    assert verified_architecture(CPU, tmp_path) == replace(detect(CPU), tested=DAY, failed=("fp16",))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda text: text.replace(DAY, "yesterday; $(x)"),
        lambda text: text.replace('"right"', '"fine"'),
        lambda text: text.replace('"concern": ""', '"concern": "fp64"'),
        lambda text: text.replace('"concern": ""', '"concern": "' + "x" * 2**20 + '"'),
    ],
)
def test_damaged_file_is_ignored(
    damage: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = keep_self_test(tmp_path)
    whole = file.read_text(encoding="utf-8")
    assert damage(whole) != whole and verified_architecture(CPU, tmp_path).tested == DAY
    file.write_text(damage(whole), encoding="utf-8")
    assert verified_architecture(CPU, tmp_path) == detect(CPU)
    assert "is ignored" in caplog.text


def test_old_file_without_concerns_marks_no_dtype_as_failed(tmp_path: Path) -> None:
    file = keep_self_test(tmp_path, CheckResult("attention in fp16", "wrong", 1.0, 0.1, concern="fp16"))
    kept = json.loads(file.read_text(encoding="utf-8"))
    for line in kept["lines"]:
        del line["concern"]
    file.write_text(json.dumps(kept), encoding="utf-8")
    assert verified_architecture(CPU, tmp_path) == replace(detect(CPU), tested=DAY)
