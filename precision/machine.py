"""Facts about this machine: GPUs, driver, PyTorch, packages. Anything broken is reported, never raised."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field

from .arch import ARCHITECTURES, Architecture, detect
from .process_state import NO_WARNINGS

if TYPE_CHECKING:
    import torch
from ..trust.message import Told

logger = logging.getLogger(__name__)

NEEDED = ("diffusers", "transformers", "onediff")
OPTIONAL = ("onediffx", "oneflow", "nexfort", "torchao")
TORCH_NEEDED = (2, 6)  # by diffusers 0.42 and transformers 5, and for reruns: torch.compiler.set_stance
GET_TORCH = "https://pytorch.org/get-started/locally/"
_SECONDS = 10  # for nvidia-smi, which is slow while the driver wakes up
_NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
_AMD_MODULE = Path("/sys/module/amdgpu")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_TRITONS = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
_Text = Annotated[str, Field(max_length=1000)]
_READ = ConfigDict(strict=False)  # reads attributes of an object; strict would accept only instances

T = TypeVar("T")


class Obstacle(str):
    """A problem that keeps everything from running, and the advice."""


class TorchTooOld(Told, RuntimeError):
    """This PyTorch is too old for the pack."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch can use in this process."""

    index: int
    name: str
    architecture: Architecture
    memory: float | None  # GiB


@dataclass(frozen=True)
class Machine:
    system: str
    python: str
    torch: str  # version, or a remark that it is missing
    torch_works: bool
    built_for: str  # "CUDA 12.8", "ROCm 6.2", "the CPU alone"; "" without PyTorch
    driver: str  # of an NVIDIA or AMD card, even if PyTorch cannot use it
    gpus: tuple[Gpu, ...]
    device: str  # the default device of pipelines: "cuda:0", "mps", "cpu"
    architecture: Architecture  # of that device
    packages: Mapping[str, str | None]  # name → version; None if not installed
    advice: tuple[str, ...]  # problems, and what to do about them


@dataclass(frozen=True)
class Platform:
    """The platform of compiled code. Code for another one may crash the process, so all fields must agree."""

    __pydantic_config__: ClassVar[ConfigDict] = _READ

    architecture: _Text  # "sm90", "cpu"
    device: _Text  # "NVIDIA H200"; a CPU by its name and a hash of its instruction sets
    torch: _Text
    triton: _Text  # "" if it is missing or not needed
    python: _Text  # "cpython-311"
    system: _Text  # "Linux x86_64, glibc 2.36"

    def misfit(self, here: Platform) -> str:
        """Say why code for it cannot be used `here`; "" if it can."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours:
                return f"it is for {field.name} '{theirs}', but this is '{ours}'"
        return ""


def look(device: Any = None) -> Machine:
    """Collect all facts. device: a torch.device to report on; None for the default device of pipelines."""
    torch, version, problem = _ask_torch()
    built_for = tried(lambda: _built_for(torch), "an unknown device") if torch else ""
    gpus = tried(lambda: tuple(_gpus(torch)), ()) if torch else ()
    driven_by = driver()
    packages = {name: version_of(name) for name in (*NEEDED, *OPTIONAL)}
    advice: list[str] = [Obstacle(problem), Obstacle(_too_old(version))]
    chosen = (device or tried(_default_device, None)) if torch else None
    if torch:
        from .kernels import no_cudnn_conv3d

        if not gpus:
            advice.append(_why_no_gpu(torch, built_for, driven_by))
        for gpu in gpus:
            lacks = _no_kernels(torch, gpu)
            advice.append(Obstacle(lacks) if str(chosen) == f"cuda:{gpu.index}" else lacks)
        advice.append(tried(no_cudnn_conv3d, "") if gpus else "")
    if lacking := [name for name in NEEDED if packages[name] is None]:
        said = f"not installed: {', '.join(lacking)}. In the pack's folder: python -m pip install -r requirements.txt"
        advice.append(said if lacking == ["onediff"] else Obstacle(said))  # without onediff, nothing is compiled
    architecture = tried(lambda: detect(chosen), ARCHITECTURES["cpu"]) if chosen else ARCHITECTURES["cpu"]
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version,
        torch_works=torch is not None,
        built_for=built_for,
        driver=driven_by or "none found, neither NVIDIA's nor AMD's",
        gpus=gpus,
        device=str(chosen or "cpu"),
        architecture=architecture,
        packages=packages,
        advice=tuple(filter(None, advice)),
    )


def check_torch() -> None:
    """Raise TorchTooOld if PyTorch is too old for the pack."""
    import torch

    if too_old := _too_old(str(torch.__version__)):
        raise TorchTooOld(too_old)


def tried(ask: Callable[[], T], otherwise: T) -> T:
    """Return `ask()`, or `otherwise` if it raises: a broken driver must not stop the report that names it."""
    try:
        return ask()
    except Exception:
        logger.debug("could not be queried", exc_info=True)
        return otherwise


def version_of(package: str) -> str | None:
    """Return a package's version from its metadata, without importing it."""
    return tried(lambda: metadata.version(package), None)


def first_line(error: BaseException) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__


def _ask_torch() -> tuple[Any, str, str]:
    """Return PyTorch, its version, and what is wrong with it. None if it cannot be imported."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a missing DLL is an OSError, a wrong numpy anything
        version = version_of("torch")
        if version is None:
            return None, "not installed", f"PyTorch is not installed. Get it from {GET_TORCH}"
        problem = f"PyTorch {version} cannot be imported ({first_line(error)}). Install it again: {GET_TORCH}"
        return None, version, problem
    return torch, str(torch.__version__), ""


def _built_for(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return "CPU and Apple GPU" if torch.backends.mps.is_built() else "the CPU alone"


def default_device() -> torch.device:
    """Return the device to compute on: CUDA's current one, else Apple's GPU, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _default_device() -> torch.device:
    with NO_WARNINGS.held():
        return default_device()


def _gpus(torch: Any) -> Iterator[Gpu]:
    """Return the GPUs that work; PyTorch may list others."""
    with NO_WARNINGS.held():  # PyTorch's warnings are reported below
        usable = tried(torch.cuda.is_available, False)
    for index in range(tried(torch.cuda.device_count, 0) if usable else 0):
        device = torch.device("cuda", index)
        total = tried(lambda device=device: float(torch.cuda.get_device_properties(device).total_memory), None)
        yield Gpu(
            index=index,
            name=str(tried(lambda device=device: torch.cuda.get_device_name(device), "a GPU without a name")),
            architecture=detect(device),
            memory=None if total is None else round(total / 2**30, 1),
        )
    if not usable and tried(torch.backends.mps.is_available, False):
        yield Gpu(0, "Apple GPU", detect(torch.device("mps")), None)


def driver() -> str:
    """Return the name and version of the graphics driver; "" if none is found."""
    smi = shutil.which("nvidia-smi")
    said = _nvidia_smi(smi) if smi else ""
    module = tried(lambda: _NVIDIA_MODULE.read_text(encoding="utf-8", errors="replace"), "")
    if not said and (found := re.search(r"\s(\d+\.\d[\d.]*)\s", module)):
        said = f"NVIDIA {found[1]}"
    if not said and tried(_AMD_MODULE.exists, False):
        version = tried(lambda: (_AMD_MODULE / "version").read_text(encoding="utf-8").strip(), "of the kernel")
        said = f"AMD amdgpu {version}"
    return said


@lru_cache(maxsize=4)
def _nvidia_smi(path: str) -> str:
    """Return "NVIDIA 550.54.14 (NVIDIA A100, NVIDIA L4)", or nvidia-smi's complaint. Asked once per process."""
    command = [path, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"NVIDIA, but nvidia-smi did not answer within {_SECONDS} s"
    except OSError as error:
        return f"NVIDIA, but nvidia-smi could not be run ({first_line(error)})"
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    if done.returncode or not lines:
        return f"NVIDIA, but nvidia-smi says: {lines[0] if lines else f'nothing, and ends with {done.returncode}'}"
    names = dict.fromkeys(line.partition(",")[2].strip() for line in lines)
    return f"NVIDIA {lines[0].partition(',')[0]} ({', '.join(names)})"


def _too_old(version: str) -> str:
    """Say that a package is too old; "" if it is not, or if its version cannot be compared."""
    from packaging.version import Version

    release = tried(lambda: Version(version).release[:2], TORCH_NEEDED)
    if release >= TORCH_NEEDED:
        return ""
    return (
        f"This pack needs PyTorch {'.'.join(map(str, TORCH_NEEDED))} or newer; this is {version}. Older versions lack "
        "functions that fp32 reruns need, and current diffusers and transformers refuse them. Update ComfyUI, or get "
        f"PyTorch from {GET_TORCH}"
    )


def _why_no_gpu(torch: Any, built_for: str, driver: str) -> str:
    """Say why PyTorch uses no GPU; "" if there is none to use."""
    if built_for.startswith(("CUDA", "ROCm")):
        hidden = "".join(f"; {name} is '{os.environ[name]}'" for name in _HIDING if name in os.environ)
        return f"PyTorch is built for {built_for}, but cannot use a GPU: {_refusal(torch)}{hidden}"
    if not driver:
        return ""
    kind = "CUDA" if driver.startswith("NVIDIA") else "ROCm"
    return (
        f"A driver is here ({driver}), but this PyTorch is built for {built_for}, so the card is not used. "
        f"Install a {kind} build: {GET_TORCH}"
    )


def _refusal(torch: Any) -> str:
    """Return PyTorch's own reason: a driver that is missing or too old, no card, a lost card."""
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - AssertionError, RuntimeError and its kin of each version
        return " ".join(str(error).split()) or type(error).__name__
    return "it finds none"


def _no_kernels(torch: Any, gpu: Gpu) -> str:
    """Say that this PyTorch has no code for the GPU; "" if it has, or if it is not built for NVIDIA's."""
    built = tried(lambda: tuple(torch.cuda.get_arch_list()), ())
    capability = tried(lambda: tuple(torch.cuda.get_device_capability(gpu.index)), None)
    if not capability or torch.version.hip or not built or _has_kernels(built, capability):
        return ""
    return (
        f"PyTorch {torch.__version__} has no kernels for {gpu.name} ({gpu.architecture.name}), only for "
        f"{', '.join(built)}. Install a build with them: {GET_TORCH}"
    )


def _has_kernels(built: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """built: as torch names them, "sm_86" for binaries, "compute_90" for what the driver compiles for newer cards."""
    for name in built:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name):
            made_for = (int(found[2]), int(found[3]))
            if made_for <= capability and (found[1] == "compute" or made_for[0] == capability[0]):
                return True
    return False


@lru_cache
def platform_of(device: torch.device, architecture: str) -> Platform:
    import torch

    on_cpu, libc = device.type == "cpu", " ".join(platform.libc_ver())
    return Platform(
        architecture=architecture,
        device=_name(device),
        torch=torch.__version__,
        triton="" if on_cpu else next(filter(None, map(version_of, _TRITONS)), ""),
        python=str(sys.implementation.cache_tag),
        system=", ".join(filter(None, [f"{platform.system()} {platform.machine()}", libc])),
    )


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return _cpu()
    if device.type == "mps":
        return f"Apple GPU, macOS {platform.mac_ver()[0]}"
    return str(getattr(torch, device.type).get_device_name(device))


def _cpu() -> str:
    """Return the CPU's name and instruction sets: inductor's code for more instruction sets would crash here."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    sets = facts.get("flags") or facts.get("Features") or torch.backends.cpu.get_cpu_capability()
    return f"{name}, {hashlib.sha256(' '.join(sorted(sets.split())).encode()).hexdigest()[:8]}"
