"""What compiled code is for: a model, a plan, and the machine that runs it."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field

from ...trust.text import for_file_name
from ..insight.machine import version_of

if TYPE_CHECKING:
    import torch

    from ...precision.arch import Architecture
    from ...precision.policy import Plan
    from ..models.on_disk import StoredModel
    from .backends import CompileOptions

_Text = Annotated[str, Field(max_length=1000)]
_READ = ConfigDict(strict=False)  # from an object, where strict would take an instance alone
_TRITONS = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")


@dataclass(frozen=True)
class Platform:
    """What runs compiled code. Code for another may crash the process, so all of it must agree."""

    __pydantic_config__: ClassVar[ConfigDict] = _READ

    architecture: _Text  # "sm90", "cpu"
    device: _Text  # "NVIDIA H200"; a CPU by its name and a hash of its instruction sets
    torch: _Text
    triton: _Text  # "" where there is none, or none is needed
    python: _Text  # "cpython-311"
    system: _Text  # "Linux x86_64, glibc 2.36"

    def misfit(self, here: Platform) -> str:
        """Why it cannot be used `here`, "" where it can."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours:
                return f"it is for {field.name} '{theirs}', and this is '{ours}'"
        return ""


@dataclass(frozen=True)
class Target:
    """What code was compiled for."""

    __pydantic_config__: ClassVar[ConfigDict] = _READ

    model: _Text  # the variant's name
    config: _Text  # hash of the denoiser's config
    dtype: _Text
    plan: _Text  # what else of the plan and the compile options the code hangs on
    machine: Platform

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        facts = json.dumps(asdict(self), sort_keys=True)
        words = (for_file_name(text, limit=60) for text in (self.model, self.machine.architecture, self.dtype))
        return f"{'-'.join(words)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def in_words(self) -> str:
        machine = self.machine
        return f"{self.model}, {self.dtype}, {self.plan}; {machine.device}, torch {machine.torch}, {machine.python}"


def target_of(
    model: StoredModel, plan: Plan, options: CompileOptions, device: torch.device, architecture: Architecture
) -> Target:
    """What a model's denoiser, or the decoder of its VAE, is compiled for, as the plan says. Sizes, LoRAs and islands
    are told apart by inductor itself."""
    of_vae = plan.component.value == "vae_decode"
    read = model.vae_config if of_vae else model.denoiser_config
    config = {name: value for name, value in read.items() if not name.startswith("_")}
    stream = "VAE decoder" if of_vae else "wide stream" if plan.wide else "narrow stream"
    sums = "sums in fp16" if plan.fp16_sums else ""
    layout = "channels last" if options.channels_last else ""
    parts = [stream, f"half accumulation {plan.accumulation}", sums, layout, options.in_words("inductor")]
    return Target(
        model=model.variant.name,
        config=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        dtype=plan.numerics,
        plan=", ".join(filter(None, parts)),
        machine=platform_of(device, architecture.name),
    )


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
    """Inductor compiles for the very CPU: code for one with more instruction sets would end this process."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    sets = facts.get("flags") or facts.get("Features") or torch.backends.cpu.get_cpu_capability()
    return f"{name}, {hashlib.sha256(' '.join(sorted(sets.split())).encode()).hexdigest()[:8]}"
