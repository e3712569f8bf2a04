"""The denoiser that a diffusers pipeline is given: guard over compiled blocks over a wide stream over the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.attention import Attended, offered
from ...precision.fallback import HalfPrecisionForward, build_half_precision_forward
from ...precision.guard import StageGuard
from ...precision.observe import BlockOutputs
from ...precision.overrides import MAX_FP16_ERROR, NOTHING, PrecisionOverrides, fp16_accumulation_in_words
from ...precision.shallow_copy import IdentityMemo, reporting, with_forward, with_identity_memo
from ...precision.step_cache import StepCache
from ..compile.backends import EAGER, MEASURED, came_to, compiled, for_dtype
from ..families.spec import ENCODERS
from ..models.lora import keys
from ..parallel.group import here
from ..parallel.guidance import PROMPT, OverHalves
from ..weights.activation_memory import estimate_activation_bytes
from ..weights.cfg_batch import split_cfg_batch, with_split_cfg_batch
from ..weights.offload import Offload
from ..weights.oom_fallback import ExecutionOption, FallbackStep
from ..weights.quantising import quantised_of
from .profiles import load_profile, update_cache
from .stage import ComponentStage
from .step_cache import make_step_cache

_APART = "both halves of its batch one after the other"


def guarded_denoiser(stage: ComponentStage) -> torch.nn.Module:
    """A shell of the denoiser that runs as the stage's plan says. The original, which it shares weights with, is
    loaded for it and not touched."""
    signature = inspect.signature(stage.module.forward)
    call: Callable[..., Any] = GuardedDenoiser(stage)
    if stage.sharing.halves:
        call = OverHalves(call, signature, stage.sharing, here(), stage.prompts)
    shell = with_forward(stage.module, call)
    return reporting(shell, dtype=torch.float32, device=stage.handle.store.placement.device)


def ways_to_denoise(
    stage: ComponentStage,
    inputs: Mapping[str, Any],
    known: PrecisionOverrides = NOTHING,
    take: Callable[[ComponentStage, bool, bool], object] = lambda *_: None,
    cached: int = 0,
) -> Iterator[ExecutionOption]:
    """Yield the ways to make the calls of a run, the fastest first.

    Ranks count alike, by the one that takes most: what they have to agree on may hang on the way.

    inputs: of a call. take: is given the stage, whether both halves of its batch are computed one after the other, and
    whether steps are cached.
    cached: how many calls of a step have values in a step cache; 0: there is none.
    """
    parted = split_cfg_batch(inputs) if here().alone else []  # ranks make the same calls, whatever room each has
    for offload, kind in stage.ways():
        for apart in (False, True)[: max(len(parted), 1)]:
            given = parted[0] if apart else inputs
            for calls in dict.fromkeys((cached * (1 + apart), 0)):
                said = [offload, "halves apart" if apart else "", "no step cache" if cached and not calls else ""]
                yield ExecutionOption(
                    ", ".join(filter(None, said)),
                    kind.weights_at_once(),
                    here().all_reduce_max(kind.counted(partial(estimate_activation_bytes, kind, given, known, calls))),
                    partial(take, kind, apart, bool(calls)),
                )


class GuardedDenoiser:
    """Calls of the denoiser in one run. It returns float32, so that guidance and scheduler compute in that."""

    def __init__(self, stage: ComponentStage):
        self._stage = stage
        self._signature = inspect.signature(stage.module.forward)
        self._known, notes = _known(stage)
        stage.report.notes += notes
        self._earlier: PrecisionOverrides | None = None  # what another denoiser learned in this run
        self._guard: StageGuard | None = None
        self._builder: DenoiserBuilder | None = None
        self._cache = make_step_cache(stage)
        self._foreseen = self._placed = False
        self._even = self._apart = False  # its batch, with guidance, can be halved; is computed half by half
        self._oom_fallback = stage.oom_fallback()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._signature.bind(*args, **kwargs).arguments
        if not here().alone:  # made once more, it would be another call than those that the other ranks wait in
            return self._called(inputs)
        self._even = len(split_cfg_batch(inputs)) > 1
        return self._oom_fallback.run(lambda: self._called(inputs), self._fallback_steps())

    def _called(self, inputs: Mapping[str, Any]) -> Any:
        if not self._foreseen and (room := self._stage.room()):
            ways = ways_to_denoise(self._stage, inputs, self._known, self._go_on, self._calls_cached())
            self._oom_fallback.choose_upfront(ways, -here().all_reduce_max(-room))  # on each
        self._foreseen = True
        if not self._placed:
            self._place(split_cfg_batch(inputs)[0] if self._apart else inputs)
        try:
            with self._stage.weights:
                output = self._step(**inputs)
        except BaseException:
            self._placed = False  # where memory ran out, it may have to leave for a while
            raise
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _place(self, inputs: Mapping[str, Any]) -> None:
        """What came before may make room for it."""
        stage = self._stage
        stage.handle.finish(*ENCODERS, *(name for name in stage.handle.family.denoisers if name != stage.name))
        calls = self._calls_cached() * (1 + self._apart)
        stage.place(lambda: estimate_activation_bytes(stage, inputs, self._known, calls))
        if self._guard is None:
            self._earlier = stage.report.learned
        self._placed = True

    def _calls_cached(self) -> int:
        """Return how many calls of a step have values in the cache, where no batch is halved."""
        return self._stage.report.calls_per_step if self._cache else 0

    def _go_on(self, stage: ComponentStage, apart: bool, cached: bool = True) -> None:
        """Have the next call set up the stage, with what this run learned so far."""
        if self._guard and self._guard.learned:
            self._known = self._guard.learned
        self._stage, self._apart, self._guard, self._builder, self._placed = stage, apart, None, None, False
        if self._cache:
            self._cache.forget()
        self._cache = self._cache if cached else None

    def _fallback_steps(self) -> list[FallbackStep]:
        """Cheaper ways to make the calls of this run, after which it is placed anew."""

        def uncached() -> str:
            if not self._cache:
                return ""
            self._go_on(self._stage, self._apart, cached=False)
            return "no step cache"

        def halves_apart() -> str:
            if not self._even or self._apart:
                return ""
            self._go_on(self._stage, True)
            return _APART

        def in_parts(offload: Offload) -> str:
            if cheaper := self._stage.cheaper(offload):
                self._go_on(cheaper, self._apart)
            return f"offload '{offload.value}'" if cheaper else ""

        return [uncached, halves_apart, partial(in_parts, Offload.GROUP), partial(in_parts, Offload.SEQUENTIAL)]

    def _step(self, **kwargs: Any) -> Any:
        self._guard = self._guard or self._planned(kwargs)
        if self._builder:
            self._builder.start()
        output = self._guard(**kwargs)
        report = self._stage.report
        if self._builder and report.steps[-1].outcome != "finite":
            self._builder.forget()
        if self._cache:
            report.cached(self._cache.keep(accepted=report.steps[-1].outcome in ("finite", "rerun")))
        if learned := self._guard.learned:
            update_cache(self._stage.handle, self._stage.name, self._stage.plan.numerics, learned)
        self._stage.report.learned = _with(self._earlier, self._stage.name, learned)
        if self._builder:
            self._builder.tell_backend()
        return output

    def _planned(self, inputs: Mapping[str, Any]) -> StageGuard:
        stage = self._stage
        self._builder = builder = DenoiserBuilder(stage, inputs, apart=self._apart, cache=self._cache)
        learner = stage.learner(stage.module, builder.build, stage.anatomy, self._known)
        rerun = stage.weights.shell(stage.module)
        made = with_split_cfg_batch if self._apart else lambda call: call
        rerun = self._cache.rerun(rerun, made) if self._cache else made(rerun)
        return stage.guard(
            stage.module,
            learner,
            rerun=rerun,
            peak_inside=builder.peak_inside,
            constant=(PROMPT,),
            pending=stage.cache_controller.pending if stage.cache_controller else None,
        )


class DenoiserBuilder:
    """Makes the denoiser as the plan and what was learned ask for: with a wide stream, compiled, with islands, or
    itself."""

    def __init__(
        self,
        stage: ComponentStage,
        inputs: Mapping[str, Any],
        *,
        apart: bool = False,
        cache: StepCache | None = None,
    ):
        handle, plan = stage.handle, stage.plan
        self._stage = stage
        self._apart = apart  # a batch is computed half by half
        self._cache = cache
        self._backend = for_dtype(handle.backend, handle.architecture, plan.dtype)
        self._quantised = quantised_of(stage)
        self._accumulates = self._fp16_accumulation()
        self._how, self._attention = handle.compile_options, ""
        if self._how.attention == MEASURED and len(offered(handle.store.placement.device)) < 2:
            self._how = replace(self._how, attention="")
        elif self._how.attention == MEASURED:
            from ..compile.attention import with_attention

            given = split_cfg_batch(inputs)[0] if apart else inputs
            self._how, self._attention = with_attention(handle, self._backend.name, plan.dtype, given)
        self._compiled: torch.nn.Module | None = None  # a shell of the latest attempt's
        self._compiles = True  # the latest attempt is compiled, where there is a backend that does
        self.tell_backend()
        self._block_outputs = BlockOutputs()
        self._of_prompt: list[IdentityMemo] = []

    def build(self, learned: PrecisionOverrides) -> HalfPrecisionForward:
        stage, family, dtype = self._stage, self._stage.handle.family, self._stage.plan.dtype
        made = build_half_precision_forward(
            stage.module,
            stage.anatomy,
            learned,
            dtype,
            wide=stage.plan.wide,
            quantised=self._quantised,
            compiled=partial(self._in_blocks, left=self._left(learned)),
            onloaded=stage.weights.shell,
            device=stage.handle.store.placement.device,
            tf32=stage.tf32,
        )
        if self._accumulates:
            made = replace(made, fp16_accumulation=not made.everything and self._is_right(learned))
        if self._quantised and (said := self._quantised.in_words()):
            stage.report.note(said)
        self._compiles = not made.everything
        self.tell_backend()
        if family.clips and dtype == "fp16" and not made.in_words:
            made = replace(made, run=self._block_outputs.watched(made.run, family.blocks[0]))
        if isinstance(made.run, torch.nn.Module):
            made = replace(made, run=self._projected_once(made.run))
        run = self._cache.attempt(made.run, self._around) if self._cache else self._around(made.run)
        return replace(made, run=run, eager=with_split_cfg_batch(made.eager) if self._apart else made.eager)

    def _fp16_accumulation(self) -> bool:
        """Whether products are to accumulate in fp16 where a step shows that it is right, by a backend that can."""
        if not self._stage.plan.fp16_sums:
            return False
        if self._backend.name not in (EAGER, "inductor"):
            self._tell_accumulation(f"nothing, since {self._backend.name} multiplies in its own way")
            return False
        return True

    def _is_right(self, learned: PrecisionOverrides) -> bool:
        """Whether a step has shown it to be right. The report says so, or why not."""
        if learned.fp16_error is None:
            return False
        self._tell_accumulation(fp16_accumulation_in_words(learned.fp16_error))
        return learned.fp16_error <= MAX_FP16_ERROR

    def _tell_accumulation(self, said: str) -> None:
        which = f"fp16 accumulation in the {self._stage.name}"
        self._stage.report.note(f"{which}: {said}", instead_of=which)

    def _left(self, learned: PrecisionOverrides) -> tuple[str, ...]:
        """Names of layers that are compiled otherwise than the plan alone says."""
        return (*learned.unquantised, *self._quantised.left) if self._quantised else ()

    def _around(self, run: Any) -> Any:
        """Return the same call with the attention that was asked for, and in halves where that is so."""
        if self._backend.name == EAGER and self._how.attention:  # what is compiled has it inside
            run = Attended(run, self._how.attention)
        return with_split_cfg_batch(run) if self._apart else run

    def start(self) -> None:
        """Have the quantised weights there for the next call, and forget what their layers were given before."""
        if self._quantised:
            self._quantised.fill()
            self._quantised.start()

    def _projected_once(self, run: torch.nn.Module) -> torch.nn.Module:
        """A shell of an attempt in which layers that see the prompt alone compute once a run. In what is watched, and
        in fp32, they compute whenever they are called."""
        shell, self._of_prompt = with_identity_memo(run, self._stage.handle.family.of_prompt)
        return shell

    def forget(self) -> None:
        """Compute them anew: a call failed, and what is kept may be why."""
        for once in self._of_prompt:
            once.forget()

    def _in_blocks(self, half: torch.nn.Module, wide: bool, left: tuple[str, ...]) -> torch.nn.Module:
        if self._backend.name == EAGER:
            return half
        handle, plan = self._stage.handle, self._stage.plan
        known = handle.store.compiled
        how = (self._backend.asked_for, self._how, plan.numerics, wide, plan.accumulation, left)
        parts = handle.family.blocks
        key = (self._stage.name, keys(self._stage.loras), *how)
        if key not in known:
            known[key] = compiled(half, parts, self._backend, self._how, device=handle.store.placement.device)
        self._compiled = made = known[key]
        self.tell_backend()
        return made

    def tell_backend(self) -> None:
        """Say in the report which one runs, and why: 'auto' may have gone on to another while it compiled."""
        report = self._stage.report
        if not self._compiles:
            report.backend, report.backend_reason = EAGER, "nothing is compiled with every layer wide"
            return
        backend = came_to(self._compiled, self._backend) if self._compiled else self._backend
        said = [backend.reason, self._stage.handle.compile_options.in_words(backend.name), self._attention]
        report.backend = backend.name
        report.backend_reason = "; ".join(filter(None, said))

    def peak_inside(self) -> torch.Tensor | None:
        """max |x| of the latest attempt's block outputs, where the family clips them, and of what its quantised layers
        were given."""
        return self._quantised.take() if self._quantised else self._block_outputs.take()


def _with(
    earlier: PrecisionOverrides | None, name: str, learned: PrecisionOverrides | None
) -> PrecisionOverrides | None:
    return earlier.with_component(name, learned) if earlier and learned else learned


def _known(stage: ComponentStage) -> tuple[PrecisionOverrides, tuple[str, ...]]:
    """What earlier runs taught, where this one learns, and what to say about it."""
    if not stage.learns:
        return NOTHING, ()
    parts = stage.anatomy.parts(dict(stage.module.named_modules()))
    return here().broadcast_from_rank0(lambda: load_profile(stage.handle, stage.name, stage.plan.numerics, parts))
