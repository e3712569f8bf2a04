"""Prompt → text embeddings, kept per prompt and plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...precision.policy import Component, Precision
from ...precision.report import RunReport
from ...precision.shallow_copy import reporting, with_forward
from ...trust.message import BadInput, Message, is_whole, listed
from .denoiser import GuardedCalls
from .feature import ClippedValues
from .handle import PipelineHandle, in_turn
from .stage import Calls, CallTold, ComponentStage

logger = logging.getLogger(__name__)

_REMEMBERED = 32  # prompts, of 3.5 MiB each at 226 × 4096 float32


@in_turn
def encode_prompts(
    handle: PipelineHandle,
    prompts: list[str],
    request: Precision | None = None,
    progress: CallTold | None = None,  # called for each prompt that is not cached
) -> tuple[list[torch.Tensor], RunReport]:
    """Encode a positive prompt, then negative ones. Returns float32 embeddings [1, tokens, channels] in the host's
    memory, and the report.

    The text encoder is loaded only where a prompt is new. Afterwards it is in main memory, where that has room.
    Raises BadInput where the model takes no prompt, or a prompt holds half a character.
    """
    _limit(handle)
    if not all(map(is_whole, prompts)):
        raise BadInput(
            "The prompt holds half a character, as from a cut-off emoji. Delete the � or the empty box, or type the "
            "emoji again."
        )
    stage = handle.stage(Component.TEXT_ENCODER, request)
    plan, report = stage.plan, stage.report
    report.notes += (*_notes(handle, prompts),)
    memo = handle.store.prompts
    zeros = dict(_zeros(handle, prompts))
    keys = {
        place: (prompt, plan.dtype, plan.guarded, stage.tf32)
        for place, prompt in enumerate(prompts)
        if place not in zeros
    }
    needed = dict.fromkeys(keys.values())
    new = [key for key in needed if key not in memo]
    found = {key: memo.pop(key) for key in needed if key in memo}
    memo |= found  # most recent last
    if new:
        calls = Calls("encoding prompt {} of {}", progress or (lambda *_: None), total=len(new))
        try:
            with handle.switched(report):
                encoded = handle.ranks.broadcast_from_rank0(
                    lambda: _encode_all(stage, [prompt for prompt, *_ in new], calls)
                )
                found |= {key: made for key, (made, _) in zip(new, encoded, strict=True)}
                # failed embeddings are not kept, so that the next run's report has the failure too
                kept = {key: made for key, (made, is_right) in zip(new, encoded, strict=True) if is_right}
        finally:
            handle.store.offload_or_unload("text_encoder")
        memo |= kept
    while len(memo) > _REMEMBERED:
        del memo[next(iter(memo))]
    made = zeros | {place: found[key] for place, key in keys.items()}
    return [made[place] for place in range(len(prompts))], report


@torch.no_grad()
def _encode_all(stage: ComponentStage, prompts: list[str], calls: Calls) -> list[tuple[torch.Tensor, bool]]:
    """Return each prompt's embeddings, and whether they are right: finite, and without a failed call."""
    import diffusers

    handle, device = stage.handle, stage.handle.store.placement.device
    pipe = getattr(diffusers, handle.family.pipeline)(
        tokenizer=_Tokenizer(handle.store.unweighted("tokenizer")),
        text_encoder=reporting(with_forward(stage.module, GuardedCalls(stage, [ClippedValues()])), device=device),
        vae=None,
        transformer=None,
        scheduler=None,
    )
    how = {"do_classifier_free_guidance": False, "max_sequence_length": _limit(handle)}
    encode = calls.telling(partial(pipe.encode_prompt, **how, device=device, dtype=torch.float32))
    embeddings = []
    for prompt in prompts:
        logger.info("encoding prompt of %d characters in %s", len(prompt), stage.plan.dtype)
        failed = stage.report.failed
        made = encode(prompt)[0].cpu()
        embeddings.append((made, bool(torch.isfinite(made).all()) and stage.report.failed == failed))
    return embeddings


def _zeros(handle: PipelineHandle, prompts: list[str]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index and the embeddings of each empty negative prompt, if the family's are zeros."""
    rule, config = handle.family.prompt, handle.store.model.denoiser_config
    for place, prompt in enumerate(prompts):
        if rule and rule.no_negative_is_zero and place > 0 and not prompt.strip():
            yield place, torch.zeros(1, rule.tokens(config), rule.channels(config))


def _limit(handle: PipelineHandle) -> int:
    rule = handle.family.prompt
    if rule is None:
        raise BadInput("{} takes no prompt: it starts from an image.", handle.store.model.variant.name)
    return rule.tokens(handle.store.model.denoiser_config)


def _notes(handle: PipelineHandle, prompts: list[str]) -> Iterator[str]:
    """Yield a note for each prompt that is too long, with the part that is cut off, and for each prompt with words that
    the tokenizer has no tokens for: all such words look alike to the model."""
    tokenizer, limit = handle.store.unweighted("tokenizer"), _limit(handle)
    for prompt in prompts:
        tokens = tokenizer(prompt).input_ids
        last = int(tokens[-1:] == [tokenizer.eos_token_id])  # T5 needs a token for the end, GLM has none
        if len(tokens) > limit:
            cut = tokenizer.decode(tokens[limit - last : len(tokens) - last])
            yield Message("the prompt is longer than {} tokens; this was cut off: {}", limit, cut)
        if (unknown := tokenizer.unk_token_id) is not None and unknown in tokens:
            ids = {word: tokenizer(word, add_special_tokens=False).input_ids for word in dict.fromkeys(prompt.split())}
            words = listed([word for word, own in ids.items() if unknown in own])
            yield Message("the model does not know these words of the prompt, in whole or in part: {}", words)


class _Tokenizer:
    """The tokenizer for diffusers. After the truncated tokens, diffusers asks for all of them, to log what it cut off.
    The report has that already, and for long prompts it is slow: the second request gets the first answer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._fitting: tuple[Any, Any] | None = None  # text, and its truncated tokens

    def __call__(self, text: Any, **how: Any) -> Any:
        if not how.get("truncation") and self._fitting and self._fitting[0] == text:
            return self._fitting[1]
        made = self._tokenizer(text, **how)
        self._fitting = (text, made) if how.get("truncation") else None
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
