"""Prompt → text embeddings, kept per prompt and plan."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...precision.fallback import HalfPrecisionForward, build_half_precision_forward
from ...precision.guard import StageGuard
from ...precision.overflow import Clips
from ...precision.overrides import PrecisionOverrides
from ...precision.policy import Component, Precision
from ...precision.report import RunReport
from ...precision.shallow_copy import reporting, with_forward
from ...trust.message import BadInput, Message
from ...trust.text import is_whole, listed
from ..weights.activation_memory import estimate_activation_bytes
from ..weights.offload import Offload
from ..weights.oom_fallback import ExecutionOption, FallbackStep
from .calls import Calls, CallTold
from .handle import PipelineHandle, in_turn
from .stage import ComponentStage

logger = logging.getLogger(__name__)

_REMEMBERED = 32  # prompts; at 226 × 4096 float32 each 3.5 MiB


@in_turn
def encode_prompts(
    handle: PipelineHandle,
    prompts: list[str],
    request: Precision | None = None,
    progress: CallTold | None = None,
) -> tuple[list[torch.Tensor], RunReport]:
    """Encode each prompt. Returns float32 embeddings [1, tokens, channels] in the host's memory, and the report.

    The text encoder is loaded only where a prompt is new. Afterwards it rests in main memory, where that has room.
    progress: is told each prompt that is new.
    Raises BadInput where the model takes no prompt, or a prompt holds half a character.
    """
    _limit(handle)
    _check_letters(prompts)
    stage = handle.stage(Component.TEXT_ENCODER, request)
    plan, report = stage.plan, stage.report
    report.notes += (*_notes(handle, prompts),)
    memo = handle.store.prompts
    keys = [(prompt, plan.dtype, plan.guarded) for prompt in prompts]
    new = [key for key in dict.fromkeys(keys) if key not in memo]
    found = {key: memo.pop(key) for key in dict.fromkeys(keys) if key in memo}
    memo |= found  # most recent last
    if new:
        calls = Calls("encoding prompt {} of {}", progress or (lambda *_: None), total=len(new))
        try:
            with handle.switched(report):
                encoded = handle.ranks.broadcast_from_rank0(
                    lambda: _encode_all(stage, [prompt for prompt, *_ in new], calls)
                )
                found |= zip(new, encoded, strict=True)
        finally:
            handle.store.offload_or_unload("text_encoder")
    memo |= {key: found[key] for key in new if torch.isfinite(found[key]).all()}  # a broken one is not worth keeping
    while len(memo) > _REMEMBERED:
        del memo[next(iter(memo))]
    return [found[key] for key in keys], report


def _encode_all(stage: ComponentStage, prompts: list[str], calls: Calls) -> list[torch.Tensor]:
    pipe = _pipeline(stage)
    encode = calls.telling(_encode)
    embeddings = []
    for prompt in prompts:
        logger.info("encoding prompt of %d characters in %s", len(prompt), stage.plan.dtype)
        embeddings.append(encode(stage.handle, pipe, prompt))
    return embeddings


def _pipeline(stage: ComponentStage) -> object:
    import diffusers

    handle = stage.handle
    return getattr(diffusers, handle.family.pipeline)(
        tokenizer=_Tokenizer(handle.store.unweighted("tokenizer")),
        text_encoder=reporting(with_forward(stage.module, _Calls(stage)), device=handle.store.placement.device),
        vae=None,
        transformer=None,
        scheduler=None,
    )


def ways_to_encode(
    stage: ComponentStage, inputs: Mapping[str, Any], take: Callable[[ComponentStage], object] = lambda _: None
) -> Iterator[ExecutionOption]:
    """Yield the ways to call the text encoder, the fastest first. inputs: of a call. take: is given the stage."""
    for offload, kind in stage.ways():
        beside = kind.counted(partial(estimate_activation_bytes, kind, inputs))
        yield ExecutionOption(offload, kind.weights_at_once(), beside, partial(take, kind))


class _Calls:
    """Calls of the text encoder, one for each prompt."""

    def __init__(self, stage: ComponentStage):
        self._stage = stage
        self._guard: StageGuard | None = None
        self._oom_fallback = stage.oom_fallback()
        self._signature = inspect.signature(stage.module.forward)
        self._foreseen = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._signature.bind(*args, **kwargs).arguments

        def called() -> Any:
            if not self._foreseen and (room := self._stage.room()):
                self._oom_fallback.choose_upfront(ways_to_encode(self._stage, inputs, self._go_on), room)
            self._foreseen = True
            self._stage.place(partial(estimate_activation_bytes, self._stage, inputs))
            self._guard = self._guard or _guarded(self._stage)
            with self._stage.weights:
                return self._guard(*args, **kwargs)

        return self._oom_fallback.run(called, self._fallback_steps())

    def _go_on(self, stage: ComponentStage) -> None:
        self._stage, self._guard = stage, None

    def _fallback_steps(self) -> list[FallbackStep]:
        def in_parts(offload: Offload) -> str:
            if cheaper := self._stage.cheaper(offload):
                self._go_on(cheaper)
            return f"offload '{offload.value}'" if cheaper else ""

        return [partial(in_parts, Offload.GROUP), partial(in_parts, Offload.SEQUENTIAL)]


def _guarded(stage: ComponentStage) -> StageGuard:
    plan, text_encoder = stage.plan, stage.module
    shell, clips = stage.weights.shell(text_encoder), Clips(plan.dtype)  # T5 clamps at ±64504

    def build(learned: PrecisionOverrides) -> HalfPrecisionForward:
        made = build_half_precision_forward(
            shell, stage.anatomy, learned, plan.dtype, everything=plan.wide, tf32=stage.tf32
        )
        return made if made.everything else replace(made, run=clips.watched(shell))

    learner = stage.learner(text_encoder, build, stage.anatomy)
    return stage.guard(text_encoder, learner, rerun=shell, peak_inside=clips.take)


@torch.no_grad()
def _encode(handle: PipelineHandle, pipe: object, prompt: str) -> torch.Tensor:
    embeddings, _ = pipe.encode_prompt(  # pyright: ignore[reportAttributeAccessIssue]
        prompt,
        do_classifier_free_guidance=False,
        max_sequence_length=_limit(handle),
        device=handle.store.placement.device,
        dtype=torch.float32,
    )
    return embeddings.cpu()


def _limit(handle: PipelineHandle) -> int:
    rule = handle.family.prompt
    if rule is None:
        raise BadInput("{} takes no prompt: it starts from an image.", handle.store.model.variant.name)
    return rule.tokens(handle.store.model.denoiser_config)


def _check_letters(prompts: list[str]) -> None:
    if not all(map(is_whole, prompts)):
        raise BadInput(
            "The prompt holds half a character, as a cut-off emoji leaves it. Delete what is shown as � or an empty "
            "box, or write the emoji again."
        )


def _notes(handle: PipelineHandle, prompts: list[str]) -> Iterator[str]:
    """A line for each prompt that is too long, with what the model does not see of it, and for each with words that the
    tokenizer has no tokens for: all such words look alike to the model."""
    tokenizer, limit = handle.store.unweighted("tokenizer"), _limit(handle)
    for prompt in prompts:
        tokens = tokenizer(prompt).input_ids
        last = int(tokens[-1:] == [tokenizer.eos_token_id])  # T5 keeps room for it, GLM has none
        if len(tokens) > limit:
            cut = tokenizer.decode(tokens[limit - last : len(tokens) - last])
            yield Message("the prompt is longer than {} tokens; this was cut off: {}", limit, cut)
        if (unknown := tokenizer.unk_token_id) is not None and unknown in tokens:
            ids = {word: tokenizer(word, add_special_tokens=False).input_ids for word in dict.fromkeys(prompt.split())}
            words = listed([word for word, own in ids.items() if unknown in own])
            yield Message("the model does not know these words of the prompt, in whole or in part: {}", words)


class _Tokenizer:
    """A tokenizer as diffusers is given it. After the tokens that fit, diffusers asks for all of them, to log what it
    cut off, which the report says: for a long prompt that takes longer than the rest together. It gets the first answer
    once more."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._fitting: tuple[Any, Any] | None = None  # of a text

    def __call__(self, text: Any, **how: Any) -> Any:
        if not how.get("truncation") and self._fitting and self._fitting[0] == text:
            return self._fitting[1]
        made = self._tokenizer(text, **how)
        self._fitting = (text, made) if how.get("truncation") else None
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
