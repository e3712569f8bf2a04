"""Inputs that several nodes share.

The options are saved in users' workflow files: add at the end, never rename.

more: further settings, such as `advanced`: pages with Nodes 2.0 show such an input only with the node's advanced
    inputs. Only for inputs that a first run does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule

CATEGORY = "OneDiff Guard"
LOAD, SAMPLE, GUARD, DIAGNOSE, NATIVE = (
    f"{CATEGORY}/{part}" for part in ("Load", "Sample", "Guard", "Diagnose", "Native")
)
NATIVE_PRECISIONS = ("auto", "bf16", "fp16", "fp16 (plain)", "fp32")  # of ComfyUI's own models, which ComfyUI quantises
PRECISIONS = (*NATIVE_PRECISIONS, "fp8", "int8")
BACKENDS = ("auto", "oneflow", "nexfort", "inductor", "eager")
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
ATTENTIONS = ("auto", "measured", "flash", "cudnn", "efficient", "math", "sage")
LAYOUTS = ("auto", "channels-last")
OFFLOADS = ("none", "model", "group", "sequential", "auto")
ACCUMULATIONS = ("auto", "fast", "fp16")
FITS = ("crop", "stretch", "refuse")
ON_FAILURE = ("rerun", "stop", "off")
SCOPES = ("step", "learned", "run")
NATIVE_SCOPES = ("step", "run", "learned")  # of ComfyUI's own models
SCHEDULERS = ("DDIM", "DPM")
STRENGTH = 0.8  # of runs that start from a video
TRANSFORMERS = {"both": "", "high noise": "transformer", "low noise": "transformer_2"}  # option → component; "": each
INHERIT = "inherit"
PRECISION_WORDS = ("fp16", "bf16", "fp32", "precision")  # words by which nodes are searched
_NONE = "none found: "  # prefix of the only entry in a list that would be empty, which ComfyUI cannot use

FROM_ENCODE_PROMPT = "From Encode Prompt."
REPORT = "Text for nodes that show or save text: which precision was used and why, and what was recomputed."
PROBED_STEPS = "Steps of a full schedule, from noise to result. Each one is measured. More steps take longer."

_PRECISION_TIP = (
    "auto (best for most): the right one for this card and model; the report says why. bf16, fp16: a failing step is "
    "recomputed in fp32; fp16 also has overflow protection. fp16 (plain): no protection, for comparison. "
    "fp32: slow, twice the memory. fp8 (RTX 40 and newer), int8 (RTX 30 and newer): faster, with quantised weights; "
    "needs torchao."
)


def precision(*, inherit: bool = False, **more: Any) -> tuple[list[str], dict[str, Any]]:
    if inherit:
        return choice((INHERIT, *PRECISIONS), f"inherit: the loader's precision. {_PRECISION_TIP}", **more)
    return choice(PRECISIONS, _PRECISION_TIP, **more)


def profile(*, wired: bool = False, **more: Any) -> tuple[str, dict[str, Any]]:
    """A guard's profile as text. wired: it comes through a socket and cannot be typed into the node."""
    probe = "Numerics Probe (MODEL)" if wired else "Numerics Probe"
    tip = (
        f"Optional profile, from {probe} or another machine (`onediff-guard profile show`). Ignored if it does not fit "
        "this model and card."
    )
    return "STRING", {"default": "", "tooltip": tip, "forceInput" if wired else "multiline": True, **more}


def native_precision() -> tuple[list[str], dict[str, Any]]:
    """The precision of ComfyUI's own models."""
    tip = (
        "inherit: ComfyUI's choice. auto (best for RTX 20 and older): the fastest precision that is safe on this card. "
        "fp16: fast, with overflow protection. bf16: fp32's range, fewer digits. fp16 (plain): ComfyUI's own fp16, no "
        "protection, for comparison. fp32: slow."
    )
    return choice((INHERIT, *NATIVE_PRECISIONS), tip)


def none_found(*kinds: str, otherwise: str = "") -> str:
    """Return the only entry of a list without files: it says where to put them. kinds: folders in ComfyUI's models."""
    return f"{_NONE}put one into {' or '.join(f'models/{kind}' for kind in kinds)}{otherwise}"


def is_none_found(value: object) -> bool:
    """Return whether a list's input holds an entry of `none_found`, of this version or an earlier one."""
    return isinstance(value, str) and value.startswith(_NONE)


def entry(files: Mapping[str, Path], name: object) -> Path | None:
    """Return the file or folder that a list's input names. A damaged workflow, or a wire, may hold any value there."""
    return files.get(name) if isinstance(name, str) else None


def pipeline() -> tuple[str, dict[str, Any]]:
    return "ONEDIFF_PIPELINE", {"tooltip": "From Load Pipeline, or a node after it such as NaN Guard."}


def choice(options: tuple[str, ...], tooltip: str, default: str = "", **more: Any) -> tuple[list[str], dict[str, Any]]:
    """A drop-down. default: the first option if empty."""
    return list(options), {"default": default or options[0], "tooltip": tooltip, **more}


class _Least(int):
    """The minimum of an input with steps: a value that is no multiple of the step above it compares as smaller.

    ComfyUI compares a number with `min` and `max`, and marks only that input if it does not fit. It does not check
    steps, and if VALIDATE_INPUTS refuses, it marks every input that is an argument of that function.
    """

    def __new__(cls, least: int, step: int, most: int) -> _Least:
        made = super().__new__(cls, least)
        made.step, made.most = step, most
        return made

    step: int
    most: int
    _refused: int = 0  # the value that was compared last, for the message

    def __gt__(self, value: int) -> bool:
        self._refused = value
        return super().__gt__(value) or (value <= self.most and (value - int(self)) % self.step != 0)

    def __format__(self, _spec: str) -> str:
        least, step = int(self), self.step
        rule = f"{step}·k + {least % step}" if least % step else f"a multiple of {step}"
        below = max(self._refused - (self._refused - least) % step, least)
        above = below + step if below + step <= self.most else below - step
        return f"{least}: use {rule}, such as {min(below, above)} or {max(below, above)}"


def size(default: int, least: int, most: int, step: int, tooltip: str) -> tuple[str, dict[str, Any]]:
    """A number that ComfyUI refuses if it is not the least value plus a multiple of the step."""
    return integer(default, _Least(least, step, most) if step > 1 else least, most, step, tooltip)


def pixels(sizes: SizeRule, width: int, height: int, trained_at: str) -> dict[str, Any]:
    tip = f"Pixels, a multiple of {sizes.pixel_multiple}. The models were trained at {trained_at}."
    least, most = sizes.pixels
    return {
        "width": size(width, least, most, sizes.pixel_multiple, tip),
        "height": size(height, least, most, sizes.pixel_multiple, tip),
    }


def frames(sizes: SizeRule, default: int, usual: str) -> tuple[str, dict[str, Any]]:
    step = sizes.frame_multiple
    return size(default, *sizes.frames, step, f"{step}·k + 1: {usual}" if step > 1 else usual)


def integer(default: int, least: int, most: int, step: int, tooltip: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "INT", {"default": default, "min": least, "max": most, "step": step, "tooltip": tooltip, **more}


def number(
    default: float, least: float, most: float, step: float, tooltip: str, **more: Any
) -> tuple[str, dict[str, Any]]:
    return "FLOAT", {"default": default, "min": least, "max": most, "step": step, "tooltip": tooltip, **more}


def flag(default: bool, tooltip: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "BOOLEAN", {"default": default, "tooltip": tooltip, **more}


def conditioning() -> dict[str, tuple[str, dict[str, Any]]]:
    negative = f"{FROM_ENCODE_PROMPT} Not used at guidance scale 1 or less."
    return {
        "positive": ("CONDITIONING", {"tooltip": FROM_ENCODE_PROMPT}),
        "negative": ("CONDITIONING", {"tooltip": negative}),
    }


def steps(default: int) -> tuple[str, dict[str, Any]]:
    return integer(default, 1, 1000, 1, "Denoising steps.")


def guidance(default: float) -> tuple[str, dict[str, Any]]:
    return number(default, 0.0, 100.0, 0.1, "1 or less: no guidance, half the compute.")


def seed() -> tuple[str, dict[str, Any]]:
    tip = "The same seed gives the same noise in every precision and on every card."
    return integer(0, 0, 2**64 - 1, 1, tip, control_after_generate=True)


def on_failure() -> tuple[list[str], dict[str, Any]]:
    return choice(
        ON_FAILURE,
        "rerun: recompute the failing step in fp32 and continue. stop: end the run and say why. "
        "off: only watch and report.",
    )


def exact_fp32() -> tuple[str, dict[str, Any]]:
    tip = "Recompute in full fp32 instead of TF32 (RTX 30 and newer). Slower; rarely needed."
    return flag(False, tip, advanced=True)


def fit() -> tuple[list[str], dict[str, Any]]:
    return choice(
        FITS,
        "For an image of another size. crop: keep the aspect ratio and cut off the edges. stretch: change the aspect "
        "ratio. refuse: end with an error.",
        advanced=True,
    )


def node_id() -> dict[str, str]:
    return {"node_id": "UNIQUE_ID"}
