"""Half-precision abilities of device architectures: one table, read by compute capability or gfx target."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

CUDA_GUIDE = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html"
OLDER_GUIDE = "https://docs.nvidia.com/deeplearning/tensorrt/archives/tensorrt-861/support-matrix/index.html"
ROCM_GUIDE = "https://rocm.docs.amd.com/en/latest/reference/precision-support.html"
MPS_NOTES = "https://github.com/pytorch/pytorch/pull/119641"
GTX16_LIST = "https://github.com/comfyanonymous/ComfyUI/blob/master/comfy/model_management.py"
XPU_GUIDE = "https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"
ONEDNN_GUIDE = "https://uxlfoundation.github.io/oneDNN/dev_guide_data_types.html"

COMPILED = "compiled code"  # in `Architecture.failed`
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"  # "1" asks for it; read when attention is first computed

# FP16 tensor TFLOPS with FP16 and with FP32 accumulate: GeForce RTX 2080 Ti, 3090 Ti, 4090, side by side
ADA_PAPER = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"

HalfAccumulation = Literal["right", "wrong", "untried"]
Fp16Sums = Literal["same", "geforce"]
Fused = Literal["there", "experimental", "missing"]


@dataclass(frozen=True)
class Architecture:
    """A row of the table: the facts about a device that the policy needs."""

    name: str  # "sm75", "gfx1100", "cpu", "mps"
    label: str  # the vendor's name of the generation
    bf16: Literal["native", "emulated", "none"]  # PyTorch's is_bf16_supported() counts emulation too
    fast_fp16: bool  # fp16 is worth having for speed
    fp16_tensor_cores: bool
    tf32: bool
    fp8: bool
    half_accumulation: HalfAccumulation  # in OneFlow's fused attention, by its users' reports
    source: str
    known: bool = True
    fp16_wrong: bool = False  # fp16 gives NaN or black, whatever the model
    fused_attention: Fused = "there"  # PyTorch's, which stores no scores
    quantises: tuple[str, ...] = ()  # formats of quantised linear layers: "int8", "fp8"
    # cards whose products are twice as fast with fp16 accumulation: "geforce", or none
    fp16_sums: Fp16Sums = "same"
    tested: str = ""  # date of this card's self-test, "2026-11-30"; "": none for its driver and PyTorch
    failed: tuple[str, ...] = ()  # its failures: dtypes of a plan, COMPILED

    @property
    def native_bf16(self) -> bool:
        return self.bf16 == "native"

    @property
    def attention_locked(self) -> bool:
        """Whether PyTorch has fused attention for it that has to be enabled by a variable."""
        return self.fused_attention == "experimental" and os.environ.get(EXPERIMENTAL) != "1"

    def __str__(self) -> str:
        return self.label if self.label.lower() == self.name else f"{self.name} ({self.label})"


# Compute capabilities of GeForce RTX 20, 30, 40 and 50, which multiply fp16 at half speed with fp32 accumulation.
# Professional and datacentre cards of the same capabilities (T4, A10, L4, RTX 6000) do not. Source: ADA_PAPER for the
# first three, NVIDIA's paper on RTX Blackwell for RTX 50.
_GEFORCE = frozenset({"sm75", "sm86", "sm89", "sm120"})


def _nvidia(
    name: str, label: str, bf16: bool, fp16: bool, tensor: bool, tf32: bool, fp8: bool, half: HalfAccumulation
) -> Architecture:
    """Make a row for NVIDIA. Quantised kernels need Ampere or newer, and fp8 in hardware for fp8."""
    source = CUDA_GUIDE if name not in ("sm60", "sm61", "sm70", "sm72") else OLDER_GUIDE
    quantises = (*(("fp8",) if fp8 else ()), *(("int8",) if bf16 else ()))
    sums, how = "geforce" if name in _GEFORCE else "same", "native" if bf16 else "emulated"
    row = Architecture(name, label, how, fp16, tensor, tf32, fp8, half, source)
    return replace(row, quantises=quantises, fp16_sums=sums)


def _amd(name: str, label: str, bf16: bool, matrix: bool, fp8: bool, fused: Fused) -> Architecture:
    """Make a row for AMD. TF32 counts as missing: for CDNA 3 and 4, libraries disagree on its accuracy. Nothing is
    quantised: torchao's kernels for AMD were neither run nor reviewed.

    fused: from AOTriton, PyTorch's fused attention on ROCm (https://github.com/ROCm/aotriton).
    """
    how = "native" if bf16 else "emulated"
    return Architecture(name, label, how, True, matrix, False, fp8, "untried", ROCM_GUIDE, fused_attention=fused)


# By name; a gfx target is found by its longest prefix here. A new architecture is one row.
ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in (
        #                             bf16   fast   tensor TF32   fp8    half-precision
        #                                    fp16   cores                accumulation
        _nvidia("sm60", "Pascal",     False, True,  False, False, False, "untried"),
        _nvidia("sm61", "Pascal",     False, False, False, False, False, "untried"),
        _nvidia("sm70", "Volta",      False, True,  True,  False, False, "right"),
        _nvidia("sm72", "Volta",      False, True,  True,  False, False, "untried"),
        _nvidia("sm75", "Turing",     False, True,  True,  False, False, "wrong"),
        # TU116 and TU117 have the same capability as others of Turing, but fp16 is wrong there.
        Architecture("sm75-gtx16", "Turing without tensor cores", "emulated", False, False, False, False, "wrong",
                     GTX16_LIST, fp16_wrong=True),
        _nvidia("sm80", "Ampere",     True,  True,  True,  True,  False, "wrong"),
        _nvidia("sm86", "Ampere",     True,  True,  True,  True,  False, "wrong"),
        _nvidia("sm87", "Ampere",     True,  True,  True,  True,  False, "untried"),
        _nvidia("sm89", "Ada",        True,  True,  True,  True,  True,  "wrong"),
        _nvidia("sm90", "Hopper",     True,  True,  True,  True,  True,  "untried"),
        _nvidia("sm100", "Blackwell", True,  True,  True,  True,  True,  "untried"),
        _nvidia("sm103", "Blackwell", True,  True,  True,  True,  True,  "untried"),
        _nvidia("sm110", "Blackwell", True,  True,  True,  True,  True,  "untried"),
        _nvidia("sm120", "Blackwell", True,  True,  True,  True,  True,  "untried"),
        _nvidia("sm121", "Blackwell", True,  True,  True,  True,  True,  "untried"),
        #                        bf16   matrix fp8    fused
        #                               cores         attention
        _amd("gfx906", "Vega 20", False, False, False, "missing"),
        _amd("gfx908", "CDNA",    True,  True,  False, "missing"),
        _amd("gfx90a", "CDNA 2",  True,  True,  False, "there"),
        _amd("gfx94", "CDNA 3",   True,  True,  True,  "there"),
        _amd("gfx95", "CDNA 4",   True,  True,  True,  "there"),
        _amd("gfx101", "RDNA",    False, False, False, "missing"),
        _amd("gfx103", "RDNA 2",  False, False, False, "missing"),
        _amd("gfx11", "RDNA 3",   True,  True,  False, "experimental"),
        _amd("gfx12", "RDNA 4",   True,  True,  True,  "experimental"),
        Architecture("mps", "Apple GPU", "emulated", True, False, False, False, "untried", MPS_NOTES),
        Architecture("xpu", "Intel GPU", "native", True, True, False, False, "untried", XPU_GUIDE),
        Architecture("cpu", "CPU", "native", False, False, False, False, "untried", ONEDNN_GUIDE, quantises=("int8",)),
        # Each product goes through float32: a VAE took 43 s to encode in bf16, and 0.3 s in fp32.
        Architecture("cpu-no-bf16", "CPU without bf16", "emulated", False, False, False, False, "untried",
                     ONEDNN_GUIDE),
    )
}  # fmt: skip


# Parts of names of sm75-gtx16 GPUs: GTX 16, the laptops' MX and the workstations' T cards of TU116 and TU117.
_GTX16 = re.compile(r"\b(1630|1650|1660|MX450|MX550|T400|T500|T550|T600|T1000|T1200|T2000|CMP 30HX)\b")


def detect(device: torch.device) -> Architecture:
    """Return a device's architecture. Unknown ones get a safe row."""
    import torch

    if device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        return replace(ARCHITECTURES["mps"], label="Apple GPU before macOS 14", bf16="none")
    if device.type == "cpu" and not _cpu_multiplies_bf16():
        return ARCHITECTURES["cpu-no-bf16"]
    if device.type == "xpu" and not _xpu_has_bf16(device):
        return replace(ARCHITECTURES["xpu"], label="Intel GPU without bf16", bf16="emulated")
    if device.type != "cuda":
        return ARCHITECTURES.get(device.type) or _unknown(device.type, "not in the table")
    try:
        if torch.version.hip:
            return by_gfx(torch.cuda.get_device_properties(device).gcnArchName)
        capability = torch.cuda.get_device_capability(device)
        if capability == (7, 5) and _GTX16.search(torch.cuda.get_device_name(device)):
            return ARCHITECTURES["sm75-gtx16"]
        row = by_capability(*capability)
        if row.fp16_sums == "geforce" and "geforce" not in torch.cuda.get_device_name(device).lower():
            return replace(row, fp16_sums="same")
        return row
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, or a PyTorch built without CUDA
        said = str(error).strip() or type(error).__name__
        return _unknown("cuda", f"could not be queried: {said.splitlines()[0]}")


def _cpu_multiplies_bf16() -> bool:
    """Return whether the CPU has bf16 products. On x86, oneDNN also counts AVX-512 without them; and PyTorch's
    attention raises in bf16 if ATEN_CPU_CAPABILITY disables AVX-512."""
    import torch

    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _xpu_has_bf16(device: torch.device) -> bool:
    import torch

    try:
        return bool(torch.xpu.get_device_properties(device).has_bfloat16_conversions)
    except (RuntimeError, AssertionError, AttributeError):  # it cannot be asked
        return True


def present() -> tuple[Architecture, ...]:
    """Return the distinct architectures of all GPUs that this process can use."""
    import torch

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return tuple(dict.fromkeys(map(detect, devices)))


def named(text: str) -> Architecture:
    """Return the row for a typed name: "sm75", "7.5", "sm75-gtx16", "gfx1100", "xpu" or "cpu".

    Raises ValueError if the text names no architecture.
    """
    name = text.strip().lower()
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if match := re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", name):
        return by_capability(int(match[1]), int(match[2]))
    if re.fullmatch(r"gfx[0-9a-f]{3,}(:.*)?", name):
        return by_gfx(name)
    raise ValueError(f"'{text}' is unknown. Use one of {', '.join(ARCHITECTURES)}, or a capability such as 7.5.")


def is_name(text: str) -> bool:
    """Return whether this may be an architecture's name: one of the table, a newer one, or a device type."""
    try:
        return named(text).name == text
    except ValueError:
        return re.fullmatch("[a-z]{2,20}", text) is not None


def by_capability(major: int, minor: int) -> Architecture:
    """Return the row of an NVIDIA compute capability. A newer one than the table's gets the nearest older row, marked
    unknown."""
    name = f"sm{major}{minor}"
    if row := ARCHITECTURES.get(name):
        return row
    rows = [row for row in ARCHITECTURES.values() if re.fullmatch(r"sm\d+", row.name)]
    listed = {(int(row.name[2:-1]), int(row.name[-1])): row for row in rows}
    older = [capability for capability in listed if capability < (major, minor)]
    if not older:
        return replace(_unknown(name, "older than the table"), fast_fp16=False)
    nearest = listed[max(older)]
    label = f"not in the table, treated as {nearest.name}"
    return replace(nearest, name=name, label=label, half_accumulation="untried", known=False, fp16_sums="same")


def by_gfx(name: str) -> Architecture:
    """Return the row of a ROCm gcnArchName (`gfx90a:sramecc+:xnack-`), by the longest prefix in the table."""
    gfx, _, _ = name.partition(":")
    prefixes = [row for row in ARCHITECTURES if row.startswith("gfx") and gfx.startswith(row)]
    if prefixes:
        return replace(ARCHITECTURES[max(prefixes, key=len)], name=gfx)
    return _unknown(gfx, "not in the table")


def _unknown(name: str, label: str) -> Architecture:
    return Architecture(name, label, "emulated", True, False, False, False, "untried", "no document", known=False)
