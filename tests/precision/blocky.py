"""Small test modules: blocks between two layers, faults to inject into half-precision calls, and a gain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import guards
import torch
from comfyui_onediff_guard.precision.after_failure import (
    FallbackAdapter,
    HalfPrecisionForward,
    build_half_precision_forward,
)
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.guard import Scope, StageGuard
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules, with_forward
from torch import nn

WIDTH = 8
Spoil = Callable[[torch.Tensor], None]  # changes an output in place


class Block(nn.Module):
    """Reads the residual stream through a norm and adds to it."""

    shrink: torch.Tensor  # factor on the output of the inner layer

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.write = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shrink", torch.ones(()))

    def forward(self, x):
        hidden = torch.sin(self.inner(self.norm(x)) * self.shrink)
        return x + self.write(hidden)


class Blocky(nn.Module):
    """x [batch, frames, WIDTH] → same shape."""

    def __init__(self, blocks: int):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, timestep=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (self.out(self.last_norm(x)),)


class Gain(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def build(blocks: int = 4, dtype: str = "fp16", seed: int = 0) -> Blocky:
    torch.manual_seed(seed)
    return Blocky(blocks).to(DTYPES[dtype]).eval().requires_grad_(False)


def overflow_inside(module: Blocky, block: int) -> None:
    """Let a block's inner layer reach 1e5 or more; the block's output stays small."""
    found: Any = module.blocks[block]
    with torch.no_grad():
        found.inner.weight.mul_(2.0**17)
        found.shrink.mul_(2.0**-18)


def overflow_stream(module: Blocky, block: int, reach: float = 5e5) -> None:
    """Let a block's output take the residual stream beyond fp16; its inputs stay in range."""
    found: Any = module.blocks[block]
    with torch.no_grad():
        found.write.weight.mul_(reach).clamp_(-6e4, 6e4)


def hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def latents(seed: int = 0, batch: int = 2, frames: int = 3) -> torch.Tensor:
    return torch.randn(batch, frames, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass
class Faults:
    """Changes half-precision outputs of named modules, in the given calls. An fp32 rerun is not affected."""

    where: dict[str, Spoil]
    calls: Collection[int]  # counted from 0
    call: int = field(default=-1)
    met: bool = field(default=False)  # whether an output was changed

    def injected(self, module: nn.Module) -> nn.Module:
        """A shallow copy of `module` with the faults in it."""

        def make(spoil: Spoil) -> Callable[[nn.Module], nn.Module]:
            def faulty(part: nn.Module) -> nn.Module:
                def forward(*args: Any, **kwargs: Any) -> Any:
                    made = part(*args, **kwargs)
                    with torch._C.DisableTorchFunction():  # hidden from function modes, like a kernel's fault
                        if self.call in self.calls and made.dtype != torch.float32:
                            self.met = True
                            spoil(made)
                    return made

                return with_forward(part, forward)

            return faulty

        return replace_submodules(module, {name: make(spoil) for name, spoil in self.where.items()})


@dataclass
class Run:
    """A guarded module, called as a sampling loop calls it."""

    module: Blocky
    guard: StageGuard
    report: RunReport
    learner: FallbackAdapter
    faults: Faults
    built: list[PrecisionOverrides]

    def __call__(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        self.faults.call += 1
        return self.guard(x, **more)[0]

    @property
    def learned(self) -> Any:
        return self.guard.learned

    def rerun(self, step: int) -> Any:
        return self.report.steps[step].rerun

    @property
    def outcomes(self) -> list[str]:
        return guards.outcomes(self.guard)

    @property
    def dtypes(self) -> list[str]:
        return [step.dtype for step in self.report.steps]


def guarded(
    module: Blocky,
    dtype: str = "fp16",
    *,
    scope: Scope = Scope.LEARNED,
    give_up_after: int = 3,
    faults: Faults | None = None,
    learned: PrecisionOverrides = NOTHING,
    **more: Any,
) -> Run:
    """more: arguments of build_half_precision_forward."""
    faults, built = faults or Faults({}, ()), []

    def make(known: PrecisionOverrides) -> HalfPrecisionForward:
        built.append(known)
        return build_half_precision_forward(faulty, known, dtype, **more)

    # the half-precision attempt uses the faulty copy; the rerun calls the module
    faulty = faults.injected(module)
    learner = FallbackAdapter(module, dtype, make, block_names(module, ["blocks"]), learned)
    guard = guards.guarded(learner, dtype, rerun=module, scope=scope, give_up_after=give_up_after)
    return Run(module, guard, guard.report, learner, faults, built)
