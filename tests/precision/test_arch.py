"""What each architecture can do, and how a device's row is found."""

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

GPU = torch.device("cuda", 0)
NVIDIA = {name: row for name, row in ARCHITECTURES.items() if name.removeprefix("sm").isdigit()}


@pytest.fixture(autouse=True)
def never_asks_pytorch_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts emulation as support: True on Volta and Turing."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: pytest.fail("it counts emulation"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """gpus((7, 5), (9, 0)): a CUDA machine with these; gpus("gfx90a:xnack-"): a ROCm one."""

    def install(*cards: tuple[int, int] | str, names: tuple[str, ...] = ("NVIDIA T4", "NVIDIA H100")) -> None:
        rocm = isinstance(cards[0], str)
        monkeypatch.setattr(torch.version, "hip", "6.2" if rocm else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            (lambda _: pytest.fail("9.0 is gfx906 as well as gfx90a")) if rocm else lambda device: cards[device.index],
        )
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(gcnArchName=cards[device.index], name=names[device.index]),
        )

    return install


@pytest.mark.parametrize("name", NVIDIA)
def test_nvidia_by_capability_as_documented(name: str) -> None:
    row, capability = NVIDIA[name], int(name[2:])
    assert row.name == name
    assert row.bf16 == ("native" if capability >= 80 else "emulated")
    assert row.tf32 == (capability >= 80)
    assert row.fp8 == (capability >= 89)
    assert row.quantises == (*(["fp8"] if row.fp8 else []), *(["int8"] if capability >= 80 else []))
    assert row.fp16_tensor_cores == (capability >= 70)
    assert row.fast_fp16 == (name != "sm61"), "GTX 10: fp16 at 1/64 of fp32"
    verdicts = {"sm70": "right", "sm75": "wrong", "sm80": "wrong", "sm86": "wrong", "sm89": "wrong"}
    assert row.half_accumulation == verdicts.get(name, "untried")
    old = capability <= 72  # the current guide begins at 7.5
    assert row.source == (arch.OLDER_GUIDE if old else arch.CUDA_GUIDE)


def test_every_nvidia_generation_since_pascal_is_listed() -> None:
    labels: dict[str, list[str]] = {}
    for name, row in NVIDIA.items():
        labels.setdefault(row.label, []).append(name)
    assert labels == {
        "Pascal": ["sm60", "sm61"],
        "Volta": ["sm70", "sm72"],
        "Turing": ["sm75"],
        "Ampere": ["sm80", "sm86", "sm87"],
        "Ada": ["sm89"],
        "Hopper": ["sm90"],
        "Blackwell": ["sm100", "sm103", "sm110", "sm120", "sm121"],
    }


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
def test_amd_by_target(name: str, label: str, bf16: str, matrix: bool, fp8: bool, fused: str) -> None:
    row = Architecture(name, label, bf16, True, matrix, False, fp8, "untried", arch.ROCM_GUIDE, fused_attention=fused)
    assert ARCHITECTURES[name] == row


def test_apple_and_cpu() -> None:
    no = {"fp16_tensor_cores": False, "tf32": False, "fp8": False, "half_accumulation": "untried"}
    assert ARCHITECTURES["mps"] == Architecture("mps", "Apple GPU", "emulated", True, **no, source=arch.MPS_NOTES)
    assert ARCHITECTURES["cpu"] == Architecture(
        "cpu", "CPU", "native", False, **no, source=arch.ONEDNN_GUIDE, quantises=("int8",)
    )


def test_rows_are_known_by_their_name_and_say_where_they_come_from() -> None:
    for name, row in ARCHITECTURES.items():
        assert row.name == name and row.known
        assert row.source.startswith("https://")
        assert row.native_bf16 == (row.bf16 == "native")


def test_an_architecture_reads_as_name_and_generation() -> None:
    assert str(ARCHITECTURES["sm75"]) == "sm75 (Turing)"
    assert str(ARCHITECTURES["mps"]) == "mps (Apple GPU)"
    assert str(ARCHITECTURES["cpu"]) == "CPU"


CPUS = [  # the machine, what oneDNN says of bf16, AVX-512's instructions for it, what PyTorch uses → the row
    ("x86_64", True, True, "AVX512", "cpu"),
    ("AMD64", True, True, "AVX512", "cpu"),
    ("x86_64", True, True, "AVX2", "cpu-no-bf16"),  # by ATEN_CPU_CAPABILITY
    ("x86_64", True, True, "DEFAULT", "cpu-no-bf16"),
    ("x86_64", True, False, "AVX512", "cpu-no-bf16"),  # oneDNN is content with AVX-512
    ("x86_64", False, False, "AVX512", "cpu-no-bf16"),
    ("aarch64", True, False, "DEFAULT", "cpu"),
    ("arm64", False, False, "DEFAULT", "cpu-no-bf16"),
]


@pytest.mark.parametrize(("machine", "onednn", "avx512", "used", "row"), CPUS)
def test_a_cpu_is_asked_for_bf16_instructions(
    monkeypatch: pytest.MonkeyPatch, machine: str, onednn: bool, avx512: bool, used: str, row: str
) -> None:
    """Without them a VAE encoded for 43 s in bf16, and for 0.3 s in fp32."""
    monkeypatch.setattr(arch.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    found = detect(torch.device("cpu"))
    assert found is ARCHITECTURES[row] is named(row)
    plan = choose(found, VARIANTS["CogVideoX-5B"], Component.VAE_ENCODE, Precision.AUTO)
    assert plan.dtype == ("bf16" if row == "cpu" else "fp32")


def test_a_cpu_is_asked_in_torchs_own_words() -> None:
    assert detect(torch.device("cpu")).name in ("cpu", "cpu-no-bf16")


@pytest.mark.parametrize("has", [True, False])
def test_intels_gpus_are_asked_for_bf16(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda _device: SimpleNamespace(has_bfloat16_conversions=has)
    )
    found = detect(torch.device("xpu"))
    assert found.native_bf16 == has
    plan = choose(found, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision.AUTO)
    assert plan.dtype == ("bf16" if has else "fp16")


def test_an_nvidia_gpu_is_found_by_its_own_capability(gpus) -> None:
    gpus((7, 5), (9, 0), names=("NVIDIA GeForce RTX 2080 Ti", "NVIDIA H100"))
    assert detect(torch.device("cuda", 0)) is ARCHITECTURES["sm75"]
    assert detect(torch.device("cuda", 1)) is ARCHITECTURES["sm90"]


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce GTX 1630", "NVIDIA GeForce GTX 1650 Ti", "NVIDIA GeForce GTX 1660 SUPER"),
        *("NVIDIA GeForce MX450", "NVIDIA GeForce MX550", "NVIDIA T400 4GB", "NVIDIA T500", "NVIDIA T550 Laptop GPU"),
        *("NVIDIA T600", "NVIDIA T1000 8GB", "Quadro T1000", "NVIDIA T1200 Laptop GPU", "Quadro T2000", "CMP 30HX"),
    ],
)
def test_turing_without_tensor_cores_is_found_by_its_name(gpus, name: str) -> None:
    """fp16 comes out NaN or black there."""
    gpus((7, 5), names=(name,))
    found = detect(GPU)
    assert found is ARCHITECTURES["sm75-gtx16"] is named("SM75-gtx16")
    assert not (found.fast_fp16 or found.fp16_tensor_cores or found.native_bf16 or found.tf32 or found.fp8)
    for variant in VARIANTS.values():
        plan = choose(found, variant, Component.DENOISER, Precision.AUTO)
        assert plan.dtype == "fp32" and "sm75-gtx16 (Turing without tensor cores)" in plan.reason
    assert choose(found, VARIANTS["SVD"], Component.DENOISER, Precision.AUTO).reason == (
        "SVD is published in fp16, which comes out wrong on sm75-gtx16 (Turing without tensor cores) → fp32"
    )


@pytest.mark.parametrize("name", ["NVIDIA T4", "Tesla T4", "NVIDIA GeForce RTX 2060", "Quadro RTX 4000", "NVIDIA T10"])
def test_turing_with_tensor_cores_is_not_mistaken(gpus, name: str) -> None:
    gpus((7, 5), names=(name,))
    assert replace(detect(GPU), fp16_sums="geforce") == ARCHITECTURES["sm75"]


def test_a_name_says_nothing_of_other_generations(gpus) -> None:
    gpus((8, 6), names=("NVIDIA T1000 of tomorrow",))
    assert replace(detect(GPU), fp16_sums="geforce") == ARCHITECTURES["sm86"]


GEFORCE = {
    (7, 5): ("NVIDIA GeForce RTX 2080 Ti", "Tesla T4"),
    (8, 6): ("NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000"),
    (8, 9): ("NVIDIA GeForce RTX 4090", "NVIDIA L4"),
    (12, 0): ("NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
}


@pytest.mark.parametrize("capability", GEFORCE)
def test_geforce_cards_gain_by_fp16_sums_and_others_of_the_same_capability_do_not(gpus, capability) -> None:
    gpus(capability, capability, names=GEFORCE[capability])
    geforce, other = (detect(torch.device("cuda", index)) for index in (0, 1))
    assert geforce.fp16_sums == "geforce" and other == replace(geforce, fp16_sums="same")
    assert len(arch.present()) == 2, "they are told apart"


def test_nobody_else_gains_by_fp16_sums() -> None:
    gain = {name for name, row in ARCHITECTURES.items() if row.fp16_sums == "geforce"}
    assert gain == {"sm75", "sm86", "sm89", "sm120"}
    assert named("sm76").fp16_sums == "same", "not in the table, and nearest to one that gains"


def test_intels_gpus_compute_bf16() -> None:
    found = detect(torch.device("xpu"))
    assert found is ARCHITECTURES["xpu"] is named("XPU") and found.native_bf16 and found.fast_fp16
    assert found.fp16_tensor_cores and not (found.tf32 or found.fp8)
    assert choose(found, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision.AUTO).dtype == "bf16"


def test_an_amd_gpu_is_found_by_its_target_without_the_suffix(gpus) -> None:
    gpus("gfx90a:sramecc+:xnack-")
    assert detect(GPU) == ARCHITECTURES["gfx90a"]


def test_a_mac_is_asked_for_macos_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 3))
    assert detect(torch.device("mps")) is ARCHITECTURES["mps"]


def test_a_mac_before_macos_14_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 7))
    found = detect(torch.device("mps"))
    assert (found.bf16, found.native_bf16, found.known) == ("none", False, True)
    assert str(found) == "mps (Apple GPU before macOS 14)"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Found no NVIDIA driver.\nPlease check."), "Found no NVIDIA driver."),
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (AssertionError(), "AssertionError"),
    ],
    ids=["driver", "build", "silent"],
)  # fmt: skip
def test_a_gpu_that_cannot_be_asked_is_taken_for_the_least(gpus, monkeypatch, error: Exception, said: str) -> None:
    def fail(_: object) -> None:
        raise error

    gpus((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    found = detect(GPU)
    assert str(found) == f"cuda (could not be asked: {said})"
    assert_safe(found)


def test_an_interrupt_is_not_taken_for_a_driver_error(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    gpus((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", interrupt)
    with pytest.raises(KeyboardInterrupt):
        detect(GPU)


@pytest.mark.parametrize("kind", ["mtia", "hpu"])
def test_a_kind_of_device_that_nobody_listed_is_safe(kind: str) -> None:
    found = detect(torch.device(kind))
    assert str(found) == f"{kind} (not in the table)"
    assert_safe(found)


def test_all_gpus_of_the_process_are_seen_each_once(gpus) -> None:
    gpus((8, 6), (7, 0), (8, 6), names=("NVIDIA GeForce RTX 3090", "Tesla V100", "NVIDIA GeForce RTX 3060"))
    assert arch.present() == (ARCHITECTURES["sm86"], ARCHITECTURES["sm70"])


def test_a_process_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arch.present() == ()


def assert_safe(found: Architecture) -> None:
    """Nothing that may be missing is used, and the row says that it is a guess."""
    assert not found.known
    assert found.bf16 == "emulated"
    assert not (found.fp16_tensor_cores or found.tf32 or found.fp8)
    assert found.half_accumulation == "untried"
    assert found.source == "no document"


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [((15, 0), "sm121"), ((12, 2), "sm121"), ((10, 1), "sm100"), ((8, 8), "sm87"), ((9, 9), "sm90"), ((7, 3), "sm72")],
)
def test_a_card_that_is_not_listed_is_taken_for_the_nearest_older_one(
    capability: tuple[int, int], nearest: str
) -> None:
    found, row = by_capability(*capability), ARCHITECTURES[nearest]
    assert str(found) == f"sm{capability[0]}{capability[1]} (not in the table, treated as {nearest})"
    assert (found.bf16, found.tf32, found.fp8) == (row.bf16, row.tf32, row.fp8)
    assert (found.fast_fp16, found.fp16_tensor_cores) == (row.fast_fp16, row.fp16_tensor_cores)
    assert found.source == row.source
    assert not found.known


def test_reports_about_a_card_say_nothing_about_its_neighbours() -> None:
    assert by_capability(7, 1).half_accumulation == "untried", "Volta's is right, by reports on sm70"
    assert by_capability(8, 8).half_accumulation == "untried"


def test_a_card_older_than_the_table_is_safe_and_slow_in_fp16() -> None:
    found = by_capability(5, 2)
    assert str(found) == "sm52 (older than the table)"
    assert not found.fast_fp16
    assert_safe(found)


@pytest.mark.parametrize(
    ("target", "row"),
    [
        ("gfx1030", "gfx103"),
        ("gfx1036", "gfx103"),
        ("gfx1010", "gfx101"),
        ("gfx1100", "gfx11"),
        ("gfx1151", "gfx11"),
        ("gfx1201", "gfx12"),
        ("gfx942:sramecc+:xnack-", "gfx94"),
        ("gfx950", "gfx95"),
        ("gfx90a", "gfx90a"),
        ("gfx908", "gfx908"),
    ],
)
def test_a_gfx_target_belongs_to_the_row_that_it_begins_with(target: str, row: str) -> None:
    found = by_gfx(target)
    assert (found.name, found.label) == (target.split(":")[0], ARCHITECTURES[row].label)
    assert found.known


def test_the_longest_gfx_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "gfx1151", ARCHITECTURES["gfx906"])
    assert by_gfx("gfx1151").label == "Vega 20"
    assert by_gfx("gfx1150").label == "RDNA 3"


@pytest.mark.parametrize("target", ["gfx9999", "gfx900", "gfx90c", "gfx10"])
def test_an_unknown_gfx_target_is_safe(target: str) -> None:
    found = by_gfx(f"{target}:xnack-")
    assert str(found) == f"{target} (not in the table)"
    assert found.fast_fp16
    assert_safe(found)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm75", "sm75"),
        ("SM_75", "sm75"),
        ("7.5", "sm75"),
        ("75", "sm75"),
        (" sm80\n", "sm80"),
        ("sm_90a", "sm90"),
        ("sm_120f", "sm120"),
        ("12.0", "sm120"),
        ("120", "sm120"),
        ("13.0", "sm130"),
        ("5.2", "sm52"),
        ("cpu", "cpu"),
        ("CPU", "cpu"),
        ("MPS", "mps"),
        ("gfx94", "gfx94"),
        ("GFX1100", "gfx1100"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx9999", "gfx9999"),
    ],
)
def test_an_architecture_as_someone_types_it(text: str, name: str) -> None:
    assert named(text).name == name


@pytest.mark.parametrize(
    "text", ["", "7", "sm", "sm7", "7,5", "7.5.1", "-7.5", "a100", "RTX 3090", "gfx", "gfxyz", "cuda"]
)
def test_what_is_no_architecture_is_refused_with_the_names_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="is no architecture") as refused:
        named(text)
    assert f"'{text}'" in str(refused.value)
    assert all(name in str(refused.value) for name in (*ARCHITECTURES, "7.5"))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("sm75", True), ("sm130", True), ("gfx90a", True), ("cpu", True), ("npu", True), ("SM75", False), ("7.5", False)]
    + [(name, False) for name in ("", "x", "gfx90a:xnack-", "my card", "../sm75", "a" * 21)],
)
def test_whether_some_device_may_have_a_name(name: str, is_one: bool) -> None:
    assert is_name(name) == is_one


def test_a_cpu_is_fast_at_nothing_that_is_half_and_fuses_attention() -> None:
    for name in ("cpu", "cpu-no-bf16"):
        row = ARCHITECTURES[name]
        assert not (row.fast_fp16 or row.fp16_tensor_cores or row.tf32 or row.fp8)
        assert row.half_accumulation == "untried" and row.fused_attention == "there"


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "arm64", "aarch64"])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_what_multiplies_bf16(monkeypatch: pytest.MonkeyPatch, machine: str, capability: str) -> None:
    """On x86, as Linux and Windows call it, PyTorch has to compute by AVX-512; an Arm processor has none."""
    monkeypatch.setattr(arch.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    has = capability == "AVX512" or machine.startswith("a")
    assert detect(torch.device("cpu")).name == ("cpu" if has else "cpu-no-bf16")


def test_bf16_on_an_apple_gpu_takes_macos_14(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, bf16 in (((13, 3), "none"), ((14, 0), "emulated"), ((15, 1), "emulated")):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *asked, has=version: has >= asked)
        assert detect(torch.device("mps")).bf16 == bf16


@pytest.mark.parametrize(("has", "bf16"), [(True, "native"), (False, "emulated")])
def test_an_intel_gpu_has_bf16_or_emulates_it(monkeypatch: pytest.MonkeyPatch, has: bool, bf16: str) -> None:
    monkeypatch.setattr(arch, "_xpu_has_bf16", lambda _device: has)
    assert detect(torch.device("xpu")).bf16 == bf16


def test_the_words_of_a_row_are_those_that_code_asks_for() -> None:
    allowed = {name: get_args(kind) for name, kind in get_type_hints(Architecture).items() if get_args(kind)}
    for row in (*ARCHITECTURES.values(), by_capability(13, 0), by_gfx("gfx9999"), arch._unknown("npu", "")):
        said = {name: word for name in allowed if isinstance(word := getattr(row, name), str)}
        assert {name: word for name, word in said.items() if word not in allowed[name]} == {}, row.name
