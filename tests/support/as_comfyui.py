"""Run nodes as ComfyUI does: validated inputs, defaults for the rest, the method named by FUNCTION, in inference mode.
Also runs the graph of every family."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS

PREFIX = "OneDiffGuard"
PROMPT, NEGATIVE = "a lighthouse above a calm sea", "grey"


class Refused(ValueError):
    """ComfyUI or the node's VALIDATE_INPUTS rejected an input: the graph does not run."""

    def __init__(self, marked: Sequence[str], message: str):
        super().__init__(f"{', '.join(marked)}: {message}")
        self.marked = tuple(marked)  # inputs marked as wrong


def call(name: str, wired: Collection[str] = (), **given: Any) -> dict[str, Any]:
    """Run one node. Returns {"result": its outputs, "ui": its UI output}.

    wired: inputs from other nodes, which ComfyUI does not know when it validates.
    """
    cls = NODE_CLASS_MAPPINGS[PREFIX + name]
    inputs = _with_defaults(cls, given)
    _validate(cls, {name: value for name, value in inputs.items() if name not in wired})
    with torch.inference_mode():
        answer = getattr(cls(), cls.FUNCTION)(**inputs)
    return answer if isinstance(answer, dict) else {"result": answer, "ui": {}}


def _validate(cls: type[Any], constants: dict[str, Any]) -> None:
    """Like ComfyUI's execution.validate_inputs: converts numbers, checks inputs that VALIDATE_INPUTS does not name, and
    marks all that it names if it rejects them. tests/comfyui/inside/validation.py tests the real one."""
    schema = cls.INPUT_TYPES()
    validate = getattr(cls, "VALIDATE_INPUTS", None)
    named = validate.__func__.__code__.co_varnames[1 : validate.__func__.__code__.co_argcount] if validate else ()
    for name, (kind, options) in {**schema["required"], **schema.get("optional", {})}.items():
        if name not in constants:
            continue
        if kind in ("INT", "FLOAT"):
            try:
                constants[name] = {"INT": int, "FLOAT": float}[kind](constants[name])
            except ValueError as error:
                raise Refused([name], f"Failed to convert an input value to a {kind} value: {error}") from None
        value = constants[name]
        if name not in named and "min" in options and value < options["min"]:
            raise Refused([name], f"Value {value} smaller than min of {options['min']}")
        if name not in named and "max" in options and value > options["max"]:
            raise Refused([name], f"Value {value} bigger than max of {options['max']}")
        if name not in named and isinstance(kind, list) and value not in kind:
            raise Refused([name], f"Value not in list: '{value}' not in {kind}")
    given = {name: constants[name] for name in named if name in constants}
    if validate and (answer := validate(**given)) is not True:
        raise Refused(list(given), answer)


def api_node(name: str, **given: Any) -> dict[str, Any]:
    """The node in API format."""
    return {"class_type": PREFIX + name, "inputs": _with_defaults(NODE_CLASS_MAPPINGS[PREFIX + name], given)}


def _with_defaults(cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    schema = cls.INPUT_TYPES()
    inputs = {**schema["required"], **schema.get("optional", {})}
    unknown = given.keys() - inputs.keys() - schema.get("hidden", {}).keys()
    assert not unknown, f"{cls.__name__} has no {unknown}"
    return {name: options["default"] for name, (_, options) in inputs.items() if "default" in options} | dict(given)


def picture(width: int = 96, height: int = 80, seed: int = 0, frames: int = 1) -> torch.Tensor:
    """A ComfyUI IMAGE of smooth random pictures."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(frames, 3, 5, 6, generator=generator)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Made:
    """The results of a graph."""

    conditioning: list[torch.Tensor]  # positive and negative
    latents: torch.Tensor
    images: torch.Tensor
    reports: dict[str, dict[str, Any]]  # "encode", "sample", "decode"
    text: str  # the sampler's report


@dataclass(frozen=True)
class Graph:
    """Load → (Encode Prompt) → Sample → Decode Latents of one family, at a small size."""

    sampler: str
    sampling: Mapping[str, Any]
    prompted: bool = True
    start: Mapping[str, Any] = field(default_factory=dict)  # an image or a video

    def load(self, folder: Path, **settings: Any) -> Any:
        """settings: inputs of the loader."""
        return call("LoadPipeline", **{"model": folder.name, "backend": "eager"} | settings)["result"][0]

    def encode(self, pipeline: Any, **settings: Any) -> dict[str, Any]:
        return call("EncodePrompt", **{"pipeline": pipeline, "prompt": PROMPT, "negative_prompt": NEGATIVE} | settings)

    def sample(self, pipeline: Any, prompts: Sequence[Any] = (), **settings: Any) -> dict[str, Any]:
        wired = dict(zip(("positive", "negative"), prompts, strict=False))
        return call(
            self.sampler, **{"pipeline": pipeline, "seed": 3, **self.sampling, **self.start, **wired} | settings
        )

    def decode(self, pipeline: Any, latents: Any, **settings: Any) -> dict[str, Any]:
        return call("DecodeLatents", pipeline=pipeline, latents=latents, **settings)

    def run(self, folder: Path, decode: str = "inherit", **settings: Any) -> Made:
        """decode: the decoder's precision. settings: inputs of the loader."""
        pipeline = self.load(folder, **settings)
        encoded = self.encode(pipeline) if self.prompted else {"result": (), "ui": {}}
        sampled = self.sample(pipeline, encoded["result"])
        latents, text = sampled["result"]
        decoded = self.decode(pipeline, latents, precision=decode)
        shown = {"encode": encoded, "sample": sampled, "decode": decoded}
        return Made(
            conditioning=[tensor for ((tensor, _),) in encoded["result"]],
            latents=latents["samples"],
            images=decoded["result"][0],
            reports={name: node["ui"]["onediff_guard"][0] for name, node in shown.items() if node["ui"]},
            text=text,
        )


def save_latent(latents: Mapping[str, torch.Tensor], file: Path) -> None:
    """Like SaveLatent of the oldest supported ComfyUI; the current one makes the tensor contiguous first."""
    content = {"latent_tensor": latents["samples"], "latent_format_version_0": torch.tensor([])}
    safetensors.torch.save_file(content, file, metadata={"prompt": ""})


def load_latent(file: Path) -> dict[str, torch.Tensor]:
    """Like LoadLatent."""
    content = safetensors.torch.load_file(file, device="cpu")
    multiplier = 1.0 if "latent_format_version_0" in content else 1.0 / 0.18215
    return {"samples": content["latent_tensor"].float() * multiplier}


_VIDEO = {"width": 32, "height": 32, "frames": 9, "steps": 2, "scheduler": "DPM"}
_FIXED = _VIDEO | {"width": 96, "height": 64}  # the only size the small 5B-I2V has position embeddings for
_IMAGE = {"width": 64, "height": 64, "steps": 2}
_FROM_VIDEO = _VIDEO | {"steps": 4, "strength": 0.5}

GRAPHS: dict[str, Graph] = {
    "2b": Graph("SampleCogVideoX", _VIDEO),
    "5b": Graph("SampleCogVideoX", _VIDEO),
    "1.5": Graph("SampleCogVideoX", _VIDEO),
    "5b-i2v": Graph("SampleCogVideoX", _FIXED, start={"image": picture()}),
    "1.5-i2v": Graph("SampleCogVideoX", _VIDEO, start={"image": picture()}),
    "5b from a video": Graph(
        "SampleCogVideoX", _FROM_VIDEO, start={"video": picture(frames=9)}
    ),
    "cogview3": Graph("SampleCogView", _IMAGE),
    "cogview4": Graph("SampleCogView", _IMAGE),
    "wan": Graph("SampleWan", {"width": 32, "height": 32, "frames": 9, "steps": 2}),
    "wan-two": Graph(
        "SampleWan", {"width": 32, "height": 32, "frames": 9, "steps": 2, "guidance_scale_2": 3.0}
    ),
    "svd": Graph(
        "SampleStableVideoDiffusion",
        {"width": 64, "height": 64, "frames": 2, "steps": 2},
        prompted=False,
        start={"image": picture()},
    ),
}  # fmt: skip
