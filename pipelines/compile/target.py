"""What compiled code is for: a model, a plan, and the machine that runs it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field

from ...precision.machine import Platform, platform_of
from ...trust.text import for_file_name

if TYPE_CHECKING:
    import torch

    from ...precision.arch import Architecture
    from ...precision.policy import Plan
    from ..models.on_disk import StoredModel
    from .backends import CompileOptions

_Text = Annotated[str, Field(max_length=1000)]
_READ = ConfigDict(strict=False)  # from an object, where strict would take an instance alone


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
        """Of its folder, without the suffix."""
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
    layout = "channels last" if options.channels_last else ""
    parts = [stream, f"half accumulation {plan.accumulation}", layout, options.in_words("inductor")]
    return Target(
        model=model.variant.name,
        config=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        dtype=plan.numerics,
        plan=", ".join(filter(None, parts)),
        machine=platform_of(device, architecture.name),
    )
