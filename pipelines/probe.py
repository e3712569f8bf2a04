"""The numerics probe: a few sampling steps in fp32, what every layer reaches in them, and the plan that follows."""

from __future__ import annotations

import inspect
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..precision.arch import Architecture
from ..precision.findings import Anatomy
from ..precision.guard import GuardPolicy, OnFailure
from ..precision.learned import NOTHING
from ..precision.policy import Plan, Precision
from ..precision.probe import Entry, Probe, Probed, Verdict, judge, recommend
from ..precision.report import RunReport, for_json
from ..precision.shells import as_float32, with_forward
from .denoiser import denoiser_guard, in_fp32
from .errors import BadInput
from .handle import PipelineHandle
from .layouts import spatial_factor
from .memory import here, keep, remember
from .profiles import Profile
from .sample import SampleSettings, StepDone, sample

DTYPES = ("fp16", "bf16", "fp32")
WORST = 10


@dataclass(frozen=True)
class Probing:
    """What was measured, and what is recommended."""

    model: str
    architecture: Architecture
    plan: Plan  # the pipeline's
    settings: SampleSettings
    probed: Probed
    timesteps: tuple[float | None, ...]
    seconds: float  # of the denoiser's calls
    healthy_seconds: float  # of as many in the plan's dtype, not compiled
    chosen: Verdict
    verdicts: tuple[Verdict, ...]  # of each dtype
    profile: Profile | None  # None for fp32, which has nothing to learn

    @property
    def profile_text(self) -> str:
        return self.profile.text() if self.profile else ""

    @property
    def headline(self) -> str:
        return f"Recommended on {self.architecture}: {self.chosen.plan}"

    @property
    def cost(self) -> str:
        steps = len(self.probed.steps)
        times = self.seconds / self.healthy_seconds if self.healthy_seconds else 0.0
        return (
            f"{steps} step{'' if steps == 1 else 's'} in {self.seconds:.3g} s, {times:.2g} × as long as healthy ones "
            f"in {self.plan.dtype}; runs without the probe pay nothing"
        )

    def text(self) -> str:
        """For people."""
        lines = [
            self.headline,
            f"    because {self._because()}",
            f"    {self._to_apply()}",
            "Each precision:",
            *(f"    {verdict.plan}: {verdict.reason}" for verdict in self.verdicts),
            f"The largest of {len(self.probed.entries())} layers and blocks:",
            *(f"    {self._in_words(entry)}" for entry in self.probed.worst(WORST)),
        ]
        if small := self._subnormal():
            share, name = small.values.subnormal, small.name
            lines.append(f"Most subnormal in fp16: {share:.1%} of what '{name}' puts out, at step {small.step + 1}")
        return "\n".join([*lines, f"Cost: {self.cost}"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        worst = [asdict(entry) | {"step": entry.step + 1} for entry in self.probed.worst(WORST)]
        return for_json(
            {
                "summary": self.headline,
                "model": self.model,
                "architecture": self.architecture.name,
                "dtype": self.chosen.dtype,
                "plan": self.chosen.plan,
                "fold_bits": self.chosen.bits,
                "learned": asdict(self.chosen.learned),
                "reason": self._because(),
                "verdicts": [asdict(v) | {"plan": v.plan, "fits": v.fits} for v in self.verdicts],
                "worst": worst,
                "measured_steps": len(self.probed.steps),
                "timesteps": self.timesteps,
                "seconds": self.seconds,
                "healthy_seconds": self.healthy_seconds,
                "profile": self.profile_text,
            }
        )

    def name_of(self, entry: Entry) -> str:
        in_stream = self.probed.anatomy.stream is not None and entry.name in self.probed.anatomy.blocks
        return f"residual stream behind {entry.name}" if in_stream else entry.name

    def needs(self) -> list[str]:
        """A line for each precision."""
        emulated = "" if self.architecture.native_bf16 else f", but {self.architecture} has no native bf16"
        return [
            f"{v.dtype}: {v.plan.removeprefix(v.dtype).strip() or 'fits'}{emulated if v.dtype == 'bf16' else ''}"
            for v in self.verdicts
        ]

    def _in_words(self, entry: Entry) -> str:
        values, said = entry.values, f"{entry.reach:.3g} in {self.name_of(entry)}, step {entry.step + 1}"
        if entry.reach == values.peak.output and values.over_eighth:
            said += f": {values.over_half:.2%} over 1/2 of fp16's range, {values.over_eighth:.2%} over 1/8"
        return said

    def _because(self) -> str:
        if self.chosen.dtype == self.plan.dtype:
            return f"{self.plan.reason}; {self.chosen.reason}"
        own = next(verdict for verdict in self.verdicts if verdict.dtype == self.plan.dtype)
        return f"{own.dtype} does not hold it: {own.reason}"

    def _to_apply(self) -> str:
        steps: list[str] = []
        if self.chosen.dtype != self.plan.dtype or (self.plan.half and not self.plan.guarded):
            steps.append(f"set precision to '{self.chosen.dtype}'")
        if self.chosen.bits or self.chosen.learned.islands or (self.plan.folded and self.chosen.dtype == "fp16"):
            steps.append("wire `profile` into the NaN Guard's `profile`, and set its scope to 'learned'")
        return f"To apply it: {'; '.join(steps)}." if steps else "Nothing has to be set for it."

    def _subnormal(self) -> Entry | None:
        entries = [entry for entry in self.probed.entries() if entry.values.subnormal > 0]
        return max(entries, key=lambda entry: entry.values.subnormal, default=None)


def probe(
    handle: PipelineHandle,
    positive: torch.Tensor | None,
    negative: torch.Tensor | None,
    settings: SampleSettings,
    *,
    image: Any = None,
    request: Precision | None = None,
    step_done: StepDone | None = None,
) -> Probing:
    """Sample with a schedule of a few steps, all of them in fp32, and measure. Arguments and errors as `sample`'s."""
    if handle.family.prompt and (positive is None or negative is None):
        raise BadInput(
            f"{handle.store.model.variant.name} needs a prompt: wire positive and negative from Encode Prompt."
        )
    measured: list[_Measured] = []

    def denoiser(handle: PipelineHandle, report: RunReport) -> torch.nn.Module:
        measured.append(_Measured(handle, report))
        return measured[0].shell()

    def on_step(done: int, total: int, report: RunReport) -> None:
        measured[0].probe.end_step()
        if step_done:
            step_done(done, total, report)

    _, report = sample(
        handle, positive, negative, settings, image=image, request=request, step_done=on_step, denoiser=denoiser
    )
    (made,), plan = measured, report.plan
    probed = made.probe.probed
    chosen = recommend(probed, plan.dtype, native_bf16=handle.architecture.native_bf16)
    profile = None
    if chosen.dtype != "fp32":
        profile = replace(here(handle, chosen.dtype), learned=chosen.learned)
    return Probing(
        model=handle.store.model.name,
        architecture=handle.architecture,
        plan=plan,
        settings=settings,
        probed=probed,
        timesteps=tuple(step.timestep for step in report.steps[:: report.calls_per_step]),
        seconds=made.seconds,
        healthy_seconds=made.healthy_seconds * len(report.steps),
        chosen=chosen,
        verdicts=tuple(judge(probed, dtype) for dtype in DTYPES),
        profile=profile,
    )


def keep_profile(handle: PipelineHandle, probing: Probing) -> str:
    """Keep the recommendation for later runs with scope 'learned', in this process and others; what to say of it."""
    if probing.profile is None or probing.profile.learned == NOTHING:
        return "nothing to keep: the recommended precision needs no profile"
    own = replace(handle, profile=None)
    remember(own, probing.profile.dtype, probing.profile.learned)
    keep(own, probing.profile.dtype)
    return f"kept as {probing.profile.name}"


def usual_size(handle: PipelineHandle, width: int, height: int, frames: int) -> tuple[int, int, int]:
    """Sizes in pixels and frames; for each 0, what the model's config says that it was made for.

    Raises BadInput where the config does not say.
    """
    config, pixels = handle.store.model.denoiser_config, spatial_factor(handle.store.model.vae_config)
    square = config.get("sample_size", 0)
    width = width or config.get("sample_width", square) * pixels
    height = height or config.get("sample_height", square) * pixels
    counted = handle.family.layout.counts_frames
    frames = frames or (config.get("sample_frames", config.get("num_frames", 0)) if counted else 1)
    if not (width and height and frames):
        raise BadInput(f"{handle.store.model.name} does not say its size: set width, height and frames.")
    return width, height, frames


class _Measured:
    """A denoiser that computes in fp32 and is watched."""

    def __init__(self, handle: PipelineHandle, report: RunReport):
        self._handle = handle
        self._report = report
        self._original = handle.store.denoiser(report.plan.dtype, handle.loras)
        self._signature = inspect.signature(self._original.forward)
        self._guard = denoiser_guard(handle, report, self._original, in_fp32(handle, self._original))
        self.probe = Probe(self._original, Anatomy.of(self._original, handle.family.blocks, handle.family.stream))
        self.seconds = 0.0
        self.healthy_seconds = 0.0  # of one call

    def shell(self) -> torch.nn.Module:
        return as_float32(with_forward(self._original, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        started = time.perf_counter()
        output = self.probe.watch(lambda: self._guard(**given))
        self.seconds += time.perf_counter() - started
        if not self.healthy_seconds:
            self.healthy_seconds = self._seconds_of_a_healthy_call(given)
        return output

    def _seconds_of_a_healthy_call(self, given: dict[str, Any]) -> float:
        """Of the second of two: the first makes room, and chooses kernels."""
        report = self._handle.report(self._report.plan)
        policy = GuardPolicy(OnFailure.OFF)
        guard = denoiser_guard(self._handle, report, self._original, self._original, report.plan.dtype, policy=policy)
        for _ in range(2):
            guard(**given)
        return report.steps[-1].seconds
