"""Inputs that several nodes share, built in one place.

The option lists stand in people's workflow files: add at the end, never rename.
"""

from __future__ import annotations

from typing import Any

CATEGORY = "OneDiff Guard"
PRECISIONS = ("auto", "bf16", "fp16", "fp16 (plain)", "fp32")
BACKENDS = ("auto", "oneflow", "nexfort", "inductor", "eager")
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
ATTENTIONS = ("auto", "measured", "flash", "cudnn", "efficient", "math")
OFFLOADS = ("none", "model", "group", "sequential")
ACCUMULATIONS = ("auto", "fast")
FITS = ("crop", "stretch", "refuse")
ON_FAILURE = ("rerun", "stop", "off")
SCOPES = ("step", "learned", "run")
NATIVE_SCOPES = ("step", "run", "learned")  # of ComfyUI's own models
SCHEDULERS = ("DDIM", "DPM")
INHERIT = "inherit"
_NONE = "none found: "  # begins what is alone in a list that would be empty, which ComfyUI cannot use

PROBED_STEPS = "Steps of a whole schedule, from noise to result, all measured. More take longer."

_PRECISION_TIP = (
    "auto: the right one for this card and model, with the reason in the report. bf16, fp16: guarded, a failing step "
    "is rerun in fp32. fp16 (plain): neither guarded nor made safe, for comparison. fp32: slow, twice the memory."
)


def precision(*, inherit: bool = False) -> tuple[list[str], dict[str, Any]]:
    if inherit:
        tip = f"inherit: as the loader says. {_PRECISION_TIP}"
        return [INHERIT, *PRECISIONS], {"default": INHERIT, "tooltip": tip}
    return list(PRECISIONS), {"default": "auto", "tooltip": _PRECISION_TIP}


def profile(*, wired: bool = False) -> tuple[str, dict[str, Any]]:
    """wired: it has a socket, and no room on the node to write in."""
    tip = (
        "What was learned elsewhere, as `onediff-guard profile show` prints it; used where it fits this model and "
        "card. Empty: what was learned here."
    )
    return "STRING", {"default": "", "tooltip": tip, "forceInput" if wired else "multiline": True}


def native_precision() -> tuple[list[str], dict[str, Any]]:
    """Of ComfyUI's own models."""
    tip = (
        "inherit: as ComfyUI chose. auto: the same on a card with native bf16; on others with fast fp16, fp16 that "
        "overflows nowhere; the reason is shown on this node. fp16: products in fp16, scaled so that they fit, all "
        "else in float32. bf16: the same in bf16. fp16 (plain): ComfyUI's own, not guarded, for comparison. fp32: slow."
    )
    return [INHERIT, *PRECISIONS], {"default": INHERIT, "tooltip": tip}


def none_found(*kinds: str, otherwise: str = "") -> str:
    """The one entry of a list without files: where to put them. kinds: folders in ComfyUI's models."""
    return f"{_NONE}put one into {' or '.join(f'models/{kind}' for kind in kinds)}{otherwise}"


def is_none_found(value: str) -> bool:
    """Whether a file's name is that entry, of this version or an earlier one."""
    return value.startswith(_NONE)


def pipeline() -> tuple[str, dict[str, Any]]:
    return "ONEDIFF_PIPELINE", {"tooltip": "From a Load node, or through a NaN Guard."}


def choice(options: tuple[str, ...], tooltip: str) -> tuple[list[str], dict[str, Any]]:
    return list(options), {"default": options[0], "tooltip": tooltip}


class _Least(int):
    """The least value of an input whose values lie in steps from there: those between count as smaller.

    ComfyUI compares a number with `min` and `max`, and marks that input alone; steps it does not check, and all inputs
    that VALIDATE_INPUTS names it marks together.
    """

    def __new__(cls, least: int, step: int = 1) -> _Least:
        made = super().__new__(cls, least)
        made.step = step
        return made

    step: int

    def __gt__(self, value: int) -> bool:
        return super().__gt__(value) or (value - int(self)) % self.step != 0

    def __format__(self, _spec: str) -> str:
        return f"{int(self)}, in steps of {self.step}"


def size(default: int, least: int, most: int, step: int, tooltip: str) -> tuple[str, dict[str, Any]]:
    """A number that ComfyUI refuses where it is not in steps from the least."""
    return integer(default, _Least(least, step), most, step, tooltip)


def integer(default: int, least: int, most: int, step: int, tooltip: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "INT", {"default": default, "min": least, "max": most, "step": step, "tooltip": tooltip, **more}


def from_hub() -> dict[str, tuple[str, dict[str, Any]]]:
    """Optional inputs of every loader."""
    hub_id = (
        "A model on the Hugging Face Hub as owner/name, used in place of model. Empty: model is used. Files go to the "
        "Hub's own cache; an interrupted download goes on where it ended."
    )
    revision = "Of hub_id: a branch, a tag or a commit. Empty: main."
    download = "Of hub_id. On: downloads what the cache lacks, newer commits too. Off: uses the cache alone."
    return {
        "hub_id": ("STRING", {"default": "", "tooltip": hub_id}),
        "revision": ("STRING", {"default": "", "tooltip": revision}),
        "download": ("BOOLEAN", {"default": True, "tooltip": download}),
    }


def on_failure() -> tuple[list[str], dict[str, Any]]:
    return choice(
        ON_FAILURE,
        "rerun: compute the failing step again in fp32 and go on. stop: end the run with the reason. "
        "off: only watch and report.",
    )


def strict() -> tuple[str, dict[str, Any]]:
    tip = "Rerun in plain fp32 instead of TF32 on cards that have TF32. Slower."
    return "BOOLEAN", {"default": False, "tooltip": tip}


def fit() -> tuple[list[str], dict[str, Any]]:
    return choice(
        FITS,
        "Where the image has another size. crop: keep its aspect, cut off at the sides. stretch: do not keep it. "
        "refuse: end with an error.",
    )


def node_id() -> dict[str, str]:
    return {"node_id": "UNIQUE_ID"}
