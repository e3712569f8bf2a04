"""The contestants of each stage."""

from __future__ import annotations

from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.guard import Scope
from contestants import (
    TUNED,
    Contestant,
    blocks,
    by_block,
    channels_last,
    eager,
    fp16_sums,
    in_bf16,
    offloaded,
    ours,
    summing_in_fp16,
    whole,
)
from denoisers import Model

EAGER, AGAIN, WHOLE, OURS = "diffusers", "diffusers again", "diffusers, torch.compile whole", "ours, inductor"
BY_BLOCK = "diffusers, torch.compile by block"
OURS_EAGER = "ours, eager"
RERUN = "ours, inductor: every step rerun"
PLAIN = "ours, inductor, fp16 (plain)"
IN_BF16 = "diffusers, bf16"
SUMS, LAST, GROUP, LAYERS = ", fp16 accumulation", ", channels-last", ", group offload", ", sequential offload"
CHECKED_SUMS = ", fp16 accumulation where its first step allows it"
AUTOTUNED = f", {TUNED}"

# The most informative contestants come first: time may run out before the last
GROUPS: dict[str, dict[str, Contestant]] = {
    "steps": {
        EAGER: eager,
        OURS: ours("inductor"),
        BY_BLOCK: by_block(),
        WHOLE: whole(),
        AGAIN: eager,
        OURS_EAGER: ours("eager"),
        "ours, inductor, without the guard": blocks,
    },
    "fp16": {
        EAGER: eager,
        OURS: ours("inductor"),
        BY_BLOCK: by_block(),
        PLAIN: ours("inductor", plain=True),
        EAGER + SUMS: summing_in_fp16(eager),
        OURS + SUMS: ours("inductor", sums=fp16_sums),
        OURS + CHECKED_SUMS: ours("inductor", scope=Scope.LEARNED, accumulation=Accumulation.FP16),
        BY_BLOCK + SUMS: summing_in_fp16(by_block()),
        WHOLE: whole(),
        AGAIN: eager,
    },
    "stream": {
        EAGER: eager,
        OURS: ours("inductor"),
        IN_BF16: in_bf16(eager),
        f"{IN_BF16}, torch.compile by block": in_bf16(by_block()),
        OURS_EAGER: ours("eager"),
    },
    "rerun": {OURS: ours("inductor"), RERUN: ours("inductor", fails=True)},  # fewer rounds: fp32 is slow
    "autotune": {
        EAGER: eager,
        OURS: ours("inductor"),
        OURS + AUTOTUNED: ours("inductor", mode=TUNED),
        BY_BLOCK + AUTOTUNED: by_block(TUNED),
        WHOLE + AUTOTUNED: whole(TUNED),
    },
    "layout": {
        EAGER: eager,
        EAGER + LAST: channels_last(eager),
        OURS: ours("inductor"),
        OURS + LAST: channels_last(ours("inductor")),
        BY_BLOCK: by_block(),
        BY_BLOCK + LAST: channels_last(by_block()),
        WHOLE + LAST: channels_last(whole()),
    },
    "offload": {
        EAGER: eager,
        OURS_EAGER: ours("eager"),
        EAGER + GROUP: offloaded("block_level"),
        OURS_EAGER + GROUP: ours("eager", offload=Offload.GROUP),
        OURS + GROUP: ours("inductor", offload=Offload.GROUP),
        EAGER + LAYERS: offloaded("leaf_level"),
        OURS_EAGER + LAYERS: ours("eager", offload=Offload.SEQUENTIAL),
    },
}
DTYPES = dict.fromkeys(GROUPS, "bf16") | {"fp16": "fp16", "stream": "fp16"}


def entrants(group: str, model: Model) -> dict[str, Contestant]:
    """Return a group's contestants. For families without overflow protection, "ours" is plain already."""
    protected = model.family.variants[0].protected
    return {name: each for name, each in GROUPS[group].items() if protected or name != PLAIN}


def not_for(stage: str, model: Model) -> str:
    """Return the reason why a stage does not apply to a model; "" if it does."""
    if stage == "stream" and model.gates is None:
        return "it has no residual stream that runs through all blocks"
    if stage == "layout" and not model.kind.startswith("UNet"):
        return "it has next to no convolutions"
    return ""
