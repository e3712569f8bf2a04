"""Invalid inputs of nodes: refused with a message before weights are read, and the next run works."""

from __future__ import annotations

import gc
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from as_comfyui import GRAPHS, Refused, call, picture
from comfyui_onediff_guard.headless.hosts import core_nodes
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.pipelines.errors import BadFolder, BadLora, BadSize
from comfyui_onediff_guard.trust.message import BadInput
from mutations import NASTY

FROM_IMAGE = ("1.5-i2v", "svd")
STARTS = {"1.5-i2v": "image", "svd": "image", "5b from a video": "video"}


@pytest.fixture
def opened(model_folder, without_comfyui):
    """opened(family) → its graph and a pipeline without loaded weights."""

    def load(family, precision="fp32"):
        gc.collect()  # pipelines of earlier tests
        graph = GRAPHS[family]
        return graph, graph.load(model_folder(family.split()[0]), precision=precision)

    return load


def prompts(graph, pipeline) -> Any:
    return graph.encode(pipeline)["result"] if graph.prompted else ()


def zero_prompts(graph) -> Any:
    return [[[torch.zeros(1, 226, 32), {}]]] * 2 if graph.prompted else ()


def no_weights_read(pipeline) -> bool:
    """Except the text encoder's, which prompts need."""
    return not pipeline.store.loaded().keys() - {"text_encoder"}


def assert_refused(graph, pipeline, error, message, **bad):
    """Assert that the sampler refuses `bad` before it reads weights, and then samples and decodes valid input."""
    wired = prompts(graph, pipeline)
    assert no_weights_read(pipeline)
    with pytest.raises(error, match=message):
        graph.sample(pipeline, wired, **bad)
    assert no_weights_read(pipeline)
    latents = graph.sample(pipeline, wired)["result"][0]
    assert torch.isfinite(graph.decode(pipeline, latents)["result"][0]).all()


# --- images -----------------------------------------------------------------------------------------------------------


def start_input(family, **size):
    frames = 9 if STARTS[family] == "video" else 1
    return {STARTS[family]: picture(frames=frames, **size)}


@pytest.mark.parametrize("family", STARTS)
def test_crop_and_stretch_fit_start_image_differently(opened, family):
    graph, pipeline = opened(family)
    wired = prompts(graph, pipeline)
    width, height = graph.sampling["width"], graph.sampling["height"]
    latents = {
        fit: graph.sample(pipeline, wired, fit=fit, **start_input(family, width=2 * width, height=height))["result"][0]
        for fit in ("crop", "stretch")
    }
    assert latents["crop"]["samples"].shape == latents["stretch"]["samples"].shape
    assert not torch.equal(latents["crop"]["samples"], latents["stretch"]["samples"])


@pytest.mark.parametrize("family", STARTS)
def test_fit_refuse_rejects_start_image_of_other_size(opened, family):
    graph, pipeline = opened(family)
    message = r"The image is 80×40, but the output is \d+×\d+. Set fit to 'crop' or 'stretch', or resize"
    assert_refused(graph, pipeline, BadInput, message, fit="refuse", **start_input(family, width=80, height=40))


@pytest.mark.parametrize("family", FROM_IMAGE)
def test_alpha_and_grey_become_rgb(opened, family):
    graph, pipeline = opened(family)
    wired = prompts(graph, pipeline)
    rgb = picture()
    grey = rgb[..., :1]
    opaque, clear = (torch.cat([rgb, torch.full_like(grey, alpha)], -1) for alpha in (1.0, 0.0))

    def sampled(image):
        return graph.sample(pipeline, wired, image=image)["result"][0]["samples"]

    assert torch.equal(sampled(opaque), sampled(rgb))
    assert torch.equal(sampled(clear), sampled(torch.zeros_like(rgb))), "transparent is black"
    assert torch.equal(sampled(grey), sampled(grey.expand_as(rgb)))
    batch = graph.sample(pipeline, wired, image=torch.cat([rgb, clear[..., :3] * 0]))
    assert torch.equal(batch["result"][0]["samples"], sampled(rgb)), "of a batch, the first"
    note = "The batch has 2 images; only the first is used."
    assert note in batch["result"][1] and note in batch["ui"]["text"][0]


NAN = picture().index_fill(1, torch.tensor([3]), float("nan"))
IMAGES = {
    "no image": (picture()[:0], r"has shape \(0, 80, 96, 3\)"),
    "no pixels": (picture()[:, :0], r"has shape \(1, 0, 96, 3\)"),
    "no batch": (picture()[0], r"has shape \((1|80), 96, 3\), but \[images, height, width, 1, 3 or 4\] is needed"),
    "channels first": (picture().permute(0, 3, 1, 2), r"has shape \(1, 3, 80, 96\)"),
    "two channels": (picture()[..., :2], r"has shape \(1, 80, 96, 2\)"),
    "NaN": (NAN, r"holds NaN or infinite values. Check the node that made it"),
    "infinite": (NAN.nan_to_num(nan=float("inf")), r"holds NaN or infinite values"),
}


@pytest.mark.parametrize("family", STARTS)
@pytest.mark.parametrize("case", IMAGES)
def test_invalid_start_image_is_refused(opened, family, case):
    graph, pipeline = opened(family)
    image, message = IMAGES[case]
    with pytest.raises(BadInput, match=message):
        graph.sample(pipeline, zero_prompts(graph), **{STARTS[family]: image})
    assert no_weights_read(pipeline)


@pytest.mark.parametrize(
    ("length", "frames", "error"),
    [(2, 9, "2 frames of the video would be used, but at least 5"), (4, 5, "4 frames of the video")],
)
def test_video_with_too_few_usable_frames_is_refused(opened, length, frames, error):
    graph, pipeline = opened("5b from a video")
    assert_refused(graph, pipeline, BadSize, error, video=picture(frames=length), frames=frames)


@pytest.mark.parametrize(
    ("length", "frames", "used", "reported"),
    [(7, 9, 5, True), (9, 9, 9, False), (9, 5, 5, True), (7, 5, 5, True), (5, 1, 1, True), (6, 5, 5, True)],
)
def test_unused_frames_of_start_video_are_reported(opened, length, frames, used, reported):
    graph, pipeline = opened("5b from a video")
    latents, report = graph.sample(pipeline, prompts(graph, pipeline), video=picture(frames=length), frames=frames)[
        "result"
    ]
    assert latents["samples"].shape[2] == (used + 3) // 4
    assert ("Of the video" in report) == reported


# --- prompts ----------------------------------------------------------------------------------------------------------

PROMPTED = ("2b", "1.5-i2v", "cogview3", "cogview4")


@pytest.mark.parametrize("family", PROMPTED)
def test_empty_prompts_give_finite_picture(opened, family):
    graph, pipeline = opened(family)
    wired = graph.encode(pipeline, prompt="", negative_prompt="")["result"]
    latents = graph.sample(pipeline, wired)["result"][0]
    assert torch.isfinite(graph.decode(pipeline, latents)["result"][0]).all()


LIMITS = {"2b": 226, "1.5-i2v": 226, "cogview3": 224, "cogview4": 1024}


@pytest.mark.parametrize("family", PROMPTED)
@pytest.mark.parametrize("which", ["prompt", "negative_prompt"])
def test_truncated_part_of_prompt_is_shown_on_node_and_in_history(opened, family, which):
    graph, pipeline = opened(family)
    long_prompt = "the end of a very long prompt " * (LIMITS[family] // 4) + "zebra"
    encoded = graph.encode(pipeline, **{which: long_prompt})
    (note,) = [note for note in encoded["ui"]["onediff_guard"][0]["notes"] if "cut off" in note]
    assert f"longer than {LIMITS[family]} tokens" in note and note.rstrip().endswith("zebra")
    assert encoded["ui"]["text"][0].count("cut off") == 1, "in the text on the node"
    again = graph.encode(pipeline, **{which: long_prompt})
    assert any("cut off" in note for note in again["ui"]["onediff_guard"][0]["notes"]), "also for a cached prompt"
    latents = graph.sample(pipeline, encoded["result"])["result"][0]["samples"]
    assert torch.isfinite(latents).all()


PROMPT_OPTIONS = [  # options that ComfyUI's nodes add to a prompt, and the sampler's message; "": no effect
    ({"area": (8, 8, 0, 0), "strength": 1.0, "set_area_to_bounds": False}, "sets area, which"),  # (Set Area)
    ({"area": ("percentage", 0.5, 0.5, 0, 0), "strength": 0.5, "set_area_to_bounds": False}, "sets area, strength"),
    ({"strength": 0.5}, "sets strength"),  # (Set Area Strength)
    ({"mask": torch.ones(1, 4, 4), "set_area_to_bounds": False, "mask_strength": 1.0}, "sets mask"),  # (Set Mask)
    ({"start_percent": 0.0, "end_percent": 0.5}, "sets end_percent"),  # SetTimestepRange
    ({"control": object(), "control_apply_to_uncond": True}, "sets control, control_apply_to_uncond"),  # ControlNet
    ({"gligen": ("position", None, [])}, "sets gligen"),
    ({"reference_latents": [torch.zeros(1)]}, "sets reference_latents"),
    ({"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, "pooled_output": torch.zeros(1, 4)}, ""),
]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("added", "message"), PROMPT_OPTIONS)
def test_unsupported_options_of_prompt_are_refused(opened, added, message, which):
    graph, pipeline = opened("cogview4")
    wired = [[[tensor, {**options, **(added if n == which else {})}] for tensor, options in each]
             for n, each in enumerate(prompts(graph, pipeline))]  # fmt: skip
    if not message:
        assert torch.isfinite(graph.sample(pipeline, wired)["result"][0]["samples"]).all()
        return
    with pytest.raises(BadInput, match=f"'{('positive', 'negative')[which]}' {message}"):
        graph.sample(pipeline, wired)
    assert no_weights_read(pipeline)


@pytest.mark.parametrize("family", PROMPTED)
def test_combined_prompts_and_unequal_batches_are_refused(opened, family):
    graph, pipeline = opened(family)
    positive, negative = prompts(graph, pipeline)
    (tensor, options), *_ = positive
    for wired, message in (
        ((positive + positive, negative), r"'positive' holds 2 prompts, but this node uses one. Remove Cond.*Comb"),
        ((positive, negative + negative), "'negative' holds 2 prompts"),
        (([[torch.cat([tensor, tensor]), options]], negative), r"'positive' has shape \(2, .* they must be equal"),
    ):
        with pytest.raises(BadInput, match=message):
            graph.sample(pipeline, wired)
        assert no_weights_read(pipeline)


@pytest.mark.parametrize(
    ("family", "scales", "reason"),
    [
        ("wan", (6.0, 3.0), ": this model has no second transformer."),
        ("wan", (6.0, 0.0), ""),
        ("wan-two", (6.0, 3.0), ""),
        ("wan-two", (1.0, 3.0), ": a guidance_scale of 1 or less switches guidance off."),
        ("wan-two", (1.0, 0.0), ""),
    ],
)
def test_unused_guidance_scale_2_is_reported(opened, family, scales, reason):
    graph, pipeline = opened(family)
    chosen = dict(zip(("guidance_scale", "guidance_scale_2"), scales, strict=True))
    sampled = graph.sample(pipeline, prompts(graph, pipeline), **chosen)
    for text in (sampled["result"][1], sampled["ui"]["text"][0]):
        assert text.count("guidance_scale_2 is not used") == text.count(f"used{reason}") == bool(reason)


@pytest.mark.parametrize(("steps", "strength"), [(1, 0.8), (4, 0.2)])
def test_video_to_video_with_less_than_one_step_is_refused(opened, steps, strength):
    graph, pipeline = opened("5b from a video")
    assert_refused(graph, pipeline, BadInput, "is less than one step", steps=steps, strength=strength)


def test_encoding_prompt_for_family_without_prompts_is_refused(opened):
    graph, pipeline = opened("svd")
    with pytest.raises(BadInput, match="takes no prompt: it starts from an image"):
        graph.encode(pipeline)
    assert no_weights_read(pipeline)


@pytest.mark.parametrize(("encoded_by", "sampled_by"), [("2b", "cogview3"), ("cogview3", "2b"), ("cogview4", "2b")])
def test_prompts_of_other_family_are_refused(opened, encoded_by, sampled_by):
    graph, pipeline = opened(encoded_by)
    foreign = prompts(graph, pipeline)
    graph, pipeline = opened(sampled_by)
    with pytest.raises(BadInput, match="Connect it to an Encode Prompt node with the same pipeline"):
        graph.sample(pipeline, foreign)
    assert no_weights_read(pipeline)


# --- sizes ------------------------------------------------------------------------------------------------------------

SIZES = [  # messages: of ComfyUI's validation of a constant, of the sampler for a wired value
    ("2b", {"frames": 0}, "0 smaller than min of 1", "frames is 0, but must be .* Nearest: 1"),
    ("1.5-i2v", {"frames": -3}, "-3 smaller than min of 1", "frames is -3.* Nearest: 1"),
    ("svd", {"frames": 0}, "0 smaller than min of 2", "frames is 0, but must be from 2 to 200. Nearest: 2"),
    ("svd", {"frames": 1}, "1 smaller than min of 2", "frames is 1, but must be from 2 to 200. Nearest: 2"),
    ("cogview3", {"width": 0}, "0 smaller than min of 64", "width is 0.* Nearest: 64"),
    (
        *("cogview4", {"height": 70}, "70 smaller than min of 64: use a multiple of 32, such as 64 or 96"),
        "height is 70, but must be a multiple of 32.* Nearest: 64",
    ),
    ("2b", {"width": 100}, "100 smaller than min of 16: use a multiple of 16, such as 96 or 112", "Nearest: 96"),
    ("2b", {"width": 3}, "3 smaller than min of 16: use a multiple of 16, such as 16 or 32", "Nearest: 16"),
    ("2b", {"frames": 10}, r"10 smaller than min of 1: use 4·k \+ 1, such as 9 or 13", "Nearest: 9"),
    ("2b", {"width": 5001}, "5001 bigger than max of 4096", "Nearest: 4096"),
    ("2b", {"width": 4090}, "4090 smaller than min of 16: use a multiple of 16, such as 4080 or 4096", "Nearest: 40"),
]


@pytest.mark.parametrize(("family", "size", "message", "_"), SIZES)
def test_invalid_constant_sizes_are_refused_before_graph_runs(opened, family, size, message, _):
    graph, pipeline = opened(family)
    with pytest.raises(Refused, match=f"Value {message}") as refusal:
        graph.sample(pipeline, zero_prompts(graph), **size)
    assert refusal.value.marked == tuple(size), "this one, and no other"


@pytest.mark.parametrize(("family", "size", "_", "message"), SIZES)
def test_invalid_wired_sizes_are_refused_before_weights_are_read(opened, family, size, message, _):
    """ComfyUI validates only constants."""
    graph, pipeline = opened(family)
    inputs = {"pipeline": pipeline, **dict(zip(("positive", "negative"), zero_prompts(graph), strict=False))}
    with pytest.raises(BadSize, match=message):
        call(graph.sampler, wired=tuple(size), **{**inputs, "seed": 3, **graph.sampling, **graph.start, **size})
    assert no_weights_read(pipeline)


WRONG = [
    (
        "svd",
        "2b",
        "for Stable Video Diffusion .SVD.*, but Sample CogVideoX samples CogVideoX and .*Use Sample Stable Video",
    ),
    ("svd", "cogview3", "but Sample CogView samples CogView3-Plus and CogView4. Use Sample Stable Video Diffusion"),
    ("2b", "svd", "for CogVideoX .*Use Sample CogVideoX"),
    ("cogview4", "5b from a video", "for CogView4 .*Use Sample CogView"),
    ("1.5-i2v", "2b", "needs a start image. Wire one to 'image'"),
    ("2b", "1.5-i2v", "does not accept a start image. Disconnect it, or load an image-to-video model"),
    ("1.5-i2v", "5b from a video", "needs a start image"),
]


@pytest.mark.parametrize(("family", "sampler", "message"), WRONG)
def test_error_of_wrong_sampler_says_what_to_use(opened, family, sampler, message):
    """Even if a size or an image does not fit the model either."""
    _, pipeline = opened(family)
    graph = GRAPHS[sampler]
    refuse = {"fit": "refuse"} if graph.start else {}
    size = 128 if sampler == "svd" else 96  # SVD cannot make 96
    with pytest.raises(BadInput, match=message):
        graph.sample(pipeline, zero_prompts(graph), **{"width": size, "height": size} | refuse)
    assert no_weights_read(pipeline)


# --- values of wrong types, as in a damaged file ----------------------------------------------------------------------

CLASSES = {**core_nodes.NODE_CLASS_MAPPINGS, **NODE_CLASS_MAPPINGS}
CHOICES = ("precision", "backend", "offload")  # of every loader
OWN_CHECKS = [
    (kind, name, inputs[name][0])
    for kind, node in CLASSES.items()
    if hasattr(node, "VALIDATE_INPUTS")
    for inputs in node.INPUT_TYPES().values()
    for name in inspect.signature(node.VALIDATE_INPUTS).parameters
    if name in inputs
]


@pytest.mark.parametrize(
    ("kind", "name", "declared"), OWN_CHECKS, ids=[f"{kind}-{name}" for kind, name, _ in OWN_CHECKS]
)
def test_validate_inputs_accepts_or_explains_any_value(own_folder: Path, kind: str, name: str, declared: Any) -> None:
    for value in NASTY:  # ComfyUI converts the value of a STRING to text before it validates
        answer = CLASSES[kind].VALIDATE_INPUTS(**{name: str(value) if declared == "STRING" else value})
        assert answer is True or (isinstance(answer, str) and answer), value


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name, _ in OWN_CHECKS if name in ("model", "lora")])
def test_invalid_model_or_lora_name_is_refused_with_message(own_folder: Path, kind: str, name: str) -> None:
    """As a wired value, which is not validated before the run."""
    node = CLASSES[kind]
    others = {"pipeline": None, "strength": 1.0} if name == "lora" else dict.fromkeys(CHOICES, "auto")
    for value in NASTY:
        assert node.IS_CHANGED(**{name: value}) == ""
        with pytest.raises((BadFolder, BadLora), match=r"Looked in|was not found"):
            getattr(node(), node.FUNCTION)(**others, **{name: value})
