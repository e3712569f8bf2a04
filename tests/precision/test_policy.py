"""Architectures, policy and switches: pure tables."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, SWITCHES, accumulation
from comfyui_onediff_guard.precision.policy import VARIANTS, Component, Precision, choose

SM70, SM75, SM80, SM90 = (arch.by_capability(*c) for c in ((7, 0), (7, 5), (8, 0), (9, 0)))
BF16_TRAINED = [v for v in VARIANTS.values() if v.trained_in == "bf16"]


@pytest.mark.parametrize("component", Component)
@pytest.mark.parametrize("variant", BF16_TRAINED, ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        (SM70, "fp16"),
        (SM75, "fp16"),
        (SM80, "bf16"),
        (SM90, "bf16"),
        (arch.CPU, "bf16"),
        (arch.by_capability(6, 1), "fp32"),
    ],
    ids=str,
)
def test_auto_for_models_trained_in_bf16(architecture, dtype, variant, component):
    plan = choose(architecture, variant, component, Precision.AUTO)
    assert plan.dtype == dtype
    assert plan.guarded == (dtype != "fp32"), "auto never picks plain fp16"
    assert str(architecture) in plan.reason
    assert plan.source.startswith("https://")


@pytest.mark.parametrize(
    ("architecture", "dtype"), [(SM75, "fp16"), (SM80, "fp16"), (SM90, "fp16"), (arch.CPU, "fp32")]
)
def test_auto_for_2b_which_was_trained_in_fp16(architecture, dtype):
    plan = choose(architecture, VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision.AUTO)
    assert plan.dtype == dtype
    assert "trained in fp16" in plan.reason


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda v: v.name)
@pytest.mark.parametrize("architecture", [SM70, SM90, arch.CPU, arch.MPS], ids=str)
def test_what_is_asked_for_is_honoured_and_explained(architecture, variant):
    for request in (Precision.BF16, Precision.FP16, Precision.FP32):
        plan = choose(architecture, variant, Component.DENOISER, request)
        assert plan.dtype == request.value
        assert plan.guarded == (request is not Precision.FP32)
        assert request.value in plan.reason
    plain = choose(architecture, variant, Component.DENOISER, Precision.FP16_PLAIN)
    assert (plain.dtype, plain.guarded, plain.folded) == ("fp16", False, False)


def test_fp16_is_folded_where_the_model_leaves_its_range_and_in_the_denoiser_alone():
    folded = {
        (variant.name, component)
        for variant in VARIANTS.values()
        for component in Component
        if choose(SM75, variant, component, Precision.AUTO).folded
    }
    assert folded == {(variant.name, Component.DENOISER) for variant in BF16_TRAINED}
    assert not choose(SM80, BF16_TRAINED[0], Component.DENOISER, Precision.AUTO).folded


def test_bf16_without_hardware_is_called_slow():
    assert "emulates" in choose(SM75, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision.BF16).reason


def test_native_bf16_and_the_rest_by_capability():
    assert not SM70.native_bf16 and not SM75.native_bf16 and SM80.native_bf16
    assert not SM75.tf32 and SM80.tf32
    assert not SM80.fp8 and arch.by_capability(8, 9).fp8
    assert {c for c in ((7, 5), (8, 0), (8, 6), (8, 9)) if arch.by_capability(*c).accumulation_risk} == {
        (7, 5), (8, 0), (8, 6), (8, 9)
    }  # fmt: skip
    assert not SM70.accumulation_risk


def test_a_card_newer_than_the_table_gets_the_nearest_older_row_and_a_warning():
    newer = arch.by_capability(15, 0)
    assert newer.native_bf16 and newer.accumulation_risk and not newer.known
    assert newer.name == "sm150" and "treated as sm121" in newer.label


def test_a_card_older_than_the_table():
    assert not arch.by_capability(5, 2).native_bf16


@pytest.mark.parametrize(("name", "bf16"), [("gfx1100", True), ("gfx1030", False), ("gfx90a:sramecc+:xnack-", True)])
def test_rocm_by_gfx(name, bf16):
    assert arch.by_gfx(name).native_bf16 == bf16


def test_unknown_rocm_is_safe():
    assert not arch.by_gfx("gfx9999").known


def test_detect_asks_the_device_for_its_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (7, 5), 1: (9, 0)}[device.index])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: pytest.fail("it counts emulation as support"))
    assert arch.detect(torch.device("cuda", 0)).name == "sm75"
    assert arch.detect(torch.device("cuda", 1)).name == "sm90"
    assert arch.detect(torch.device("cpu")) == arch.CPU
    assert not arch.detect(torch.device("xpu")).known


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("architecture", "value"), [(SM70, "1"), (SM75, "0"), (SM80, "0"), (arch.by_capability(15, 0), "0")]
)
def test_accumulation_by_architecture_and_restored(architecture, value):
    with accumulation(architecture) as switches:
        assert [os.environ[name] for name in SWITCHES] == [value, value]
        assert {s.set_by for s in switches} == {"onediff-guard"}
        assert architecture.name in switches[0].reason
    assert not any(name in os.environ for name in SWITCHES)


def test_accumulation_is_restored_on_error():
    with pytest.raises(KeyboardInterrupt), accumulation(SM80):
        raise KeyboardInterrupt
    assert ATTENTION_SWITCH not in os.environ


@pytest.mark.parametrize("exported", ["1", "0", "true", "off"])
def test_a_value_that_the_user_exported_wins(monkeypatch, exported):
    monkeypatch.setenv(ATTENTION_SWITCH, exported)
    with accumulation(SM80) as switches:
        assert os.environ[ATTENTION_SWITCH] == exported
        assert switches[0].set_by == "user"
    assert os.environ[ATTENTION_SWITCH] == exported


def test_nonsense_is_respected_and_named(monkeypatch):
    monkeypatch.setenv(ATTENTION_SWITCH, "maybe")
    with accumulation(SM80) as switches:
        assert "'maybe', which OneFlow takes for false" in switches[0].reason


def test_the_safest_value_wins_while_runs_overlap():
    inside, leave = threading.Event(), threading.Event()

    def risky():
        with accumulation(SM80):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=risky)
    with accumulation(SM70):
        assert os.environ[ATTENTION_SWITCH] == "1"
        thread.start()
        assert inside.wait(30)
        assert os.environ[ATTENTION_SWITCH] == "0"
        with accumulation(SM70) as switches:
            assert switches[0].value == "0" and "another run" in switches[0].reason
        leave.set()
        thread.join()
        assert os.environ[ATTENTION_SWITCH] == "1"
    assert ATTENTION_SWITCH not in os.environ
