"""The architecture table: what each architecture supports, and how a device's row is found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.arch import (
    ARCHITECTURES,
    Architecture,
    by_capability,
    by_gfx,
    detect,
    is_name,
    named,
)
from comfyui_onediff_guard.precision.policy import Component, Precision, choose

GPU, CPU, MPS, XPU = (torch.device(name) for name in ("cuda:0", "cpu", "mps", "xpu"))
NVIDIA = {name: row for name, row in ARCHITECTURES.items() if name.removeprefix("sm").isdigit()}


@pytest.fixture(autouse=True)
def forbid_is_bf16_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts emulation as support: True on Volta and Turing."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: pytest.fail("it counts emulation"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """gpus((7, 5), (9, 0)): a CUDA machine with these cards; gpus("gfx90a:xnack-"): a ROCm machine."""

    def install(*cards: tuple[int, int] | str, names: tuple[str, ...] = ("NVIDIA T4", "NVIDIA H100")) -> None:
        rocm = isinstance(cards[0], str)
        no_capability = lambda _: pytest.fail("9.0 is gfx906 as well as gfx90a")  # noqa: E731
        monkeypatch.setattr(torch.version, "hip", "6.2" if rocm else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", no_capability if rocm else lambda device: cards[device.index]
        )
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(gcnArchName=cards[device.index], name=names[device.index]),
        )

    return install


def dtype_of(row: Architecture, component: Component = Component.DENOISER) -> str:
    return choose(row, VARIANTS["CogVideoX-5B"], component, Precision.AUTO).dtype


def assert_safe(found: Architecture) -> None:
    """No optional feature is used, and the row is marked as a guess."""
    assert not (found.known or found.fp16_tensor_cores or found.tf32 or found.fp8)
    assert (found.bf16, found.half_accumulation, found.source) == ("emulated", "untried", "no document")


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NVIDIA)
def test_nvidia_rows_match_documentation(name: str) -> None:
    row, capability = NVIDIA[name], int(name[2:])
    assert row.bf16 == ("native" if capability >= 80 else "emulated")
    assert (row.tf32, row.fp8, row.fp16_tensor_cores) == (capability >= 80, capability >= 89, capability >= 70)
    assert row.quantises == (*(["fp8"] if row.fp8 else []), *(["int8"] if capability >= 80 else []))
    assert row.fast_fp16 == (name != "sm61"), "GTX 10: fp16 at 1/64 of fp32"
    verdicts = {"sm70": "right", "sm75": "wrong", "sm80": "wrong", "sm86": "wrong", "sm89": "wrong"}
    assert row.half_accumulation == verdicts.get(name, "untried")
    assert row.source == (arch.OLDER_GUIDE if capability <= 72 else arch.CUDA_GUIDE), "the current guide begins at 7.5"
    assert row.fp16_sums == ("geforce" if name in ("sm75", "sm86", "sm89", "sm120") else "same")


@pytest.mark.parametrize(
    ("name", "label", "bf16", "matrix", "fp8", "fused"),
    [
        ("gfx906", "Vega 20", "emulated", False, False, "missing"),
        ("gfx908", "CDNA", "native", True, False, "missing"),
        ("gfx90a", "CDNA 2", "native", True, False, "there"),
        ("gfx94", "CDNA 3", "native", True, True, "there"),
        ("gfx95", "CDNA 4", "native", True, True, "there"),
        ("gfx101", "RDNA", "emulated", False, False, "missing"),
        ("gfx103", "RDNA 2", "emulated", False, False, "missing"),
        ("gfx11", "RDNA 3", "native", True, False, "experimental"),
        ("gfx12", "RDNA 4", "native", True, True, "experimental"),
    ],
)
def test_amd_rows_match_documentation(name: str, label: str, bf16: str, matrix: bool, fp8: bool, fused: str) -> None:
    row = Architecture(name, label, bf16, True, matrix, False, fp8, "untried", arch.ROCM_GUIDE, fused_attention=fused)
    assert ARCHITECTURES[name] == row


def test_apple_intel_and_cpu_rows() -> None:
    no = {"fp16_tensor_cores": False, "tf32": False, "fp8": False, "half_accumulation": "untried"}
    cpu = Architecture("cpu", "CPU", "native", False, **no, source=arch.ONEDNN_GUIDE, quantises=("int8",))
    assert ARCHITECTURES["mps"] == Architecture("mps", "Apple GPU", "emulated", True, **no, source=arch.MPS_NOTES)
    assert ARCHITECTURES["cpu"] == cpu and cpu.fused_attention == "there"
    without = replace(cpu, name="cpu-no-bf16", label="CPU without bf16", bf16="emulated", quantises=())
    assert ARCHITECTURES["cpu-no-bf16"] == without
    xpu = no | {"fp16_tensor_cores": True}
    assert ARCHITECTURES["xpu"] == Architecture("xpu", "Intel GPU", "native", True, **xpu, source=arch.XPU_GUIDE)


def test_rows_have_names_sources_and_allowed_values() -> None:
    for name, row in ARCHITECTURES.items():
        assert row.name == name and row.known and row.source.startswith("https://")
        assert row.native_bf16 == (row.bf16 == "native")
    said = [str(ARCHITECTURES[name]) for name in ("sm75", "mps", "cpu")]
    assert said == ["sm75 (Turing)", "mps (Apple GPU)", "CPU"]
    allowed = {name: get_args(kind) for name, kind in get_type_hints(Architecture).items() if get_args(kind)}
    for row in (*ARCHITECTURES.values(), by_capability(13, 0), by_gfx("gfx9999"), arch._unknown("npu", "")):
        words = {name: word for name in allowed if isinstance(word := getattr(row, name), str)}
        assert {name: word for name, word in words.items() if word not in allowed[name]} == {}, row.name


# --- detection of devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "onednn", "avx512", "used", "row"),
    [
        ("x86_64", True, True, "AVX512", "cpu"),
        ("AMD64", True, True, "AVX512", "cpu"),
        ("x86_64", True, True, "AVX2", "cpu-no-bf16"),  # set by ATEN_CPU_CAPABILITY
        ("AMD64", True, True, "AVX2", "cpu-no-bf16"),
        ("x86_64", True, True, "DEFAULT", "cpu-no-bf16"),
        ("x86_64", True, False, "AVX512", "cpu-no-bf16"),  # oneDNN accepts AVX-512 alone
        ("x86_64", False, False, "AVX512", "cpu-no-bf16"),
        ("x86_64", None, True, "AVX512", "cpu-no-bf16"),  # without oneDNN
        ("aarch64", True, False, "DEFAULT", "cpu"),
        ("arm64", True, True, "AVX2", "cpu"),
        ("arm64", False, False, "DEFAULT", "cpu-no-bf16"),
    ],
)
def test_cpu_bf16_support_is_detected(monkeypatch, machine, onednn, avx512, used, row):
    """Without bf16 instructions a VAE took 43 s to encode in bf16, and 0.3 s in fp32."""
    assert detect(CPU).name in ("cpu", "cpu-no-bf16"), "on this machine"
    monkeypatch.setattr(arch.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn is not None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn is not False, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    found = detect(CPU)
    assert found is ARCHITECTURES[row] is named(row)
    assert dtype_of(found, Component.VAE_ENCODE) == ("bf16" if row == "cpu" else "fp32")


@pytest.mark.parametrize("has", [True, False, None])
def test_intel_gpu_bf16_support_is_detected(monkeypatch: pytest.MonkeyPatch, has: bool | None) -> None:
    """None: PyTorch does not report it."""
    properties = SimpleNamespace() if has is None else SimpleNamespace(has_bfloat16_conversions=has)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _device: properties)
    found = detect(XPU)
    assert (found.bf16, dtype_of(found)) == (("emulated", "fp16") if has is False else ("native", "bf16"))
    assert has is False or found is ARCHITECTURES["xpu"] is named("XPU")


@pytest.mark.parametrize("version", [(13, 3), (13, 7), (14, 0), (15, 1)])
def test_mac_before_macos_14_has_no_bf16(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *asked: version >= asked)
    found = detect(MPS)
    if version >= (14, 0):
        assert found is ARCHITECTURES["mps"]
    else:
        assert (found.bf16, found.native_bf16, found.known) == ("none", False, True)
        assert str(found) == "mps (Apple GPU before macOS 14)"


TURING_ALONE = [
    *("NVIDIA GeForce GTX 1630", "NVIDIA GeForce GTX 1650 Ti", "NVIDIA GeForce GTX 1660 SUPER", "CMP 30HX"),
    *("NVIDIA GeForce MX450", "NVIDIA GeForce MX550", "NVIDIA T400 4GB", "NVIDIA T500", "NVIDIA T550 Laptop GPU"),
    *("NVIDIA T600", "NVIDIA T1000 8GB", "Quadro T1000", "NVIDIA T1200 Laptop GPU", "Quadro T2000"),
]


@pytest.mark.parametrize("name", TURING_ALONE)
def test_turing_without_tensor_cores_is_detected_by_name(gpus, name: str) -> None:
    """fp16 gives NaN or black images on these cards."""
    gpus((7, 5), names=(name,))
    found = detect(GPU)
    assert found is ARCHITECTURES["sm75-gtx16"] is named("SM75-gtx16")
    assert not (found.fast_fp16 or found.fp16_tensor_cores or found.native_bf16 or found.tf32 or found.fp8)
    for variant in VARIANTS.values():
        plan = choose(found, variant, Component.DENOISER, Precision.AUTO)
        assert plan.dtype == "fp32" and "sm75-gtx16 (Turing without tensor cores)" in plan.reason
    assert (
        "published in fp16, which gives wrong results on"
        in choose(found, VARIANTS["SVD"], Component.DENOISER, Precision.AUTO).reason
    )


@pytest.mark.parametrize(
    ("capability", "name", "row"),
    [((7, 5), name, "sm75") for name in ("NVIDIA T4", "Tesla T4", "NVIDIA GeForce RTX 2060", "NVIDIA T10")]
    + [((7, 5), "Quadro RTX 4000", "sm75"), ((8, 6), "NVIDIA T1000 of tomorrow", "sm86")],
)
def test_other_cards_are_not_taken_for_turing_without_tensor_cores(gpus, capability, name, row) -> None:
    gpus(capability, names=(name,))
    assert replace(detect(GPU), fp16_sums="geforce") == ARCHITECTURES[row]


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((7, 5), ("NVIDIA GeForce RTX 2080 Ti", "Tesla T4")),
        ((8, 6), ("NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000")),
        ((8, 9), ("NVIDIA GeForce RTX 4090", "NVIDIA L4")),
        ((12, 0), ("NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition")),
    ],
)
def test_only_geforce_cards_gain_from_fp16_sums(gpus, capability, names) -> None:
    gpus(capability, capability, names=names)
    geforce, other = (detect(torch.device("cuda", index)) for index in (0, 1))
    assert geforce is by_capability(*capability) and other == replace(geforce, fp16_sums="same")
    assert len(arch.present()) == 2, "two different rows"


def test_present_lists_each_gpu_architecture_once(gpus) -> None:
    gpus((8, 6), (7, 0), (8, 6), names=("NVIDIA GeForce RTX 3090", "Tesla V100", "NVIDIA GeForce RTX 3060"))
    assert arch.present() == (ARCHITECTURES["sm86"], ARCHITECTURES["sm70"])
    gpus("gfx90a:sramecc+:xnack-")
    assert arch.present() == (ARCHITECTURES["gfx90a"],)


def test_process_without_gpus_lists_no_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arch.present() == ()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Found no NVIDIA driver.\nPlease check."), "Found no NVIDIA driver."),
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (AssertionError(), "AssertionError"),
        (KeyboardInterrupt(), None),
    ],
    ids=["driver", "build", "silent", "an interrupt"],
)
def test_gpu_that_fails_detection_gets_safe_defaults(gpus, monkeypatch, error, said: str | None) -> None:
    def fail(_: object) -> None:
        raise error

    gpus((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    if said is None:
        with pytest.raises(type(error)):
            detect(GPU)
    else:
        assert str(detect(GPU)) == f"cuda (could not be queried: {said})"
        assert_safe(detect(GPU))


# --- names, and devices that are not in the table ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (detect(torch.device("mtia")), "mtia (not in the table)"),
        (detect(torch.device("hpu")), "hpu (not in the table)"),
        (by_capability(5, 2), "sm52 (older than the table)"),
        *((by_gfx(f"gfx{it}:xnack-"), f"gfx{it} (not in the table)") for it in ("9999", "900", "90c", "10")),
    ],
)
def test_unlisted_devices_get_safe_defaults(found: Architecture, said: str) -> None:
    assert str(found) == said and found.fast_fp16 == (found.name != "sm52")
    assert_safe(found)


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [
        *(((15, 0), "sm121"), ((12, 2), "sm121"), ((10, 1), "sm100"), ((9, 9), "sm90")),
        *(((8, 8), "sm87"), ((7, 6), "sm75"), ((7, 3), "sm72"), ((7, 1), "sm70")),
    ],
)
def test_unlisted_card_is_treated_as_nearest_older_one(capability, nearest):
    """Half-accumulation reports and the GeForce gain are not taken from the older card."""
    found, row = by_capability(*capability), ARCHITECTURES[nearest]
    assert str(found) == f"sm{capability[0]}{capability[1]} (not in the table, treated as {nearest})"
    unsaid = {"half_accumulation": "untried", "fp16_sums": "same", "known": False}
    assert found == replace(row, name=found.name, label=found.label, **unsaid)


TARGETS = {
    "gfx1030": "gfx103", "gfx1036": "gfx103", "gfx1010": "gfx101", "gfx1100": "gfx11", "gfx1151": "gfx11",
    "gfx1201": "gfx12", "gfx942:sramecc+:xnack-": "gfx94", "gfx950": "gfx95", "gfx90a": "gfx90a", "gfx908": "gfx908",
}  # fmt: skip


@pytest.mark.parametrize(("target", "row"), TARGETS.items())
def test_gfx_target_uses_row_with_its_prefix(target: str, row: str) -> None:
    assert by_gfx(target) == replace(ARCHITECTURES[row], name=target.split(":")[0])


def test_longest_matching_gfx_row_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "gfx1151", ARCHITECTURES["gfx906"])
    assert [by_gfx(name).label for name in ("gfx1151", "gfx1150")] == ["Vega 20", "RDNA 3"]


TYPED = {
    "sm75": "sm75", "SM_75": "sm75", "7.5": "sm75", "75": "sm75", " sm80\n": "sm80", "sm_90a": "sm90",
    "sm_120f": "sm120", "12.0": "sm120", "120": "sm120", "13.0": "sm130", "5.2": "sm52", "cpu": "cpu", "CPU": "cpu",
    "MPS": "mps", "gfx94": "gfx94", "GFX1100": "gfx1100", "gfx90a:sramecc+:xnack-": "gfx90a", "gfx9999": "gfx9999",
    **dict.fromkeys(["", "7", "sm", "sm7", "7,5", "7.5.1", "-7.5", "a100", "RTX 3090", "gfx", "gfxyz", "cuda"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "name"), TYPED.items())
def test_typed_architecture_names_are_parsed_or_rejected(text: str, name: str | None) -> None:
    if name:
        assert named(text).name == name
    else:
        with pytest.raises(ValueError, match="is unknown") as refused:
            named(text)
        assert all(part in str(refused.value) for part in (f"'{text}'", *ARCHITECTURES, "7.5"))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("sm75", True), ("sm130", True), ("gfx90a", True), ("cpu", True), ("npu", True), ("SM75", False), ("7.5", False)]
    + [(name, False) for name in ("", "x", "gfx90a:xnack-", "my card", "../sm75", "a" * 21)],
)
def test_is_name_accepts_only_device_names(name: str, is_one: bool) -> None:
    assert is_name(name) == is_one
