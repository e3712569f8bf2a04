"""Every family end to end on small folders, against its diffusers pipeline called by hand."""

from __future__ import annotations

import functools

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.trust.message import BadInput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import opened, picture, start_image
from tiers import by_tier

PROMPT = "a lighthouse above a calm sea"
TEXT_TO_IMAGE = ("cogview3", "cogview4")


def prompts(handle):
    (positive, negative), _ = encode_prompts(handle, [PROMPT, "grey"])
    return positive, negative


def make(handle, sampling, *, chunk=0, tiling=False, **start):
    embeddings = prompts(handle) if handle.family.prompt else (None, None)
    latents, report = sample(handle, *embeddings, sampling, **start)
    frames, _ = decode(handle, latents, chunk=chunk, tiling=tiling)
    return frames, report


def by_hand(handle, sampling, kind=None, *, tiling=False, loaded=True, **given):
    """loaded: with the same tensors, since alignment in memory changes the last bit of a convolution on some CPUs."""
    family = handle.family
    weights = {name: handle.store.module(name, "fp32") for name in family.weighted if loaded}
    pipe = getattr(diffusers, kind or family.pipeline).from_pretrained(handle.store.model.path, **weights)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.use_tiling = tiling
    if sampling.scheduler:
        scheduler = getattr(diffusers, family.schedulers[sampling.scheduler])
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    if family.prompt:
        given = {"prompt": PROMPT, "negative_prompt": "grey", "guidance_scale": sampling.guidance_scale} | given
    result = pipe(
        width=sampling.width,
        height=sampling.height,
        num_inference_steps=sampling.steps,
        generator=torch.Generator().manual_seed(sampling.seed),
        output_type="pt",
        **given,
    )
    if "frames" in result:
        return result.frames[0][-sampling.frames :].permute(0, 2, 3, 1).float()  # of CogVideoX, 5 frames come as 8
    return result.images.permute(0, 2, 3, 1).float()


def largest_difference(found, expected):
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def sizes(widths, heights, frames):
    return st.tuples(st.sampled_from(widths), st.sampled_from(heights), st.sampled_from(frames))


DRAWN = {"steps": st.integers(1, 3), "seed": st.integers(0, 2**32)}
GUIDED = DRAWN | {"guidance_scale": st.sampled_from([1.0, 5.0])}
SCHEDULED = GUIDED | {"scheduler": st.sampled_from(["DDIM", "DPM"])}
PICTURE = GUIDED | {"size": sizes([64, 96, 128], [64, 96], [1])}
FROM_VIDEO = SCHEDULED | {
    "size": sizes([64], [48], [5, 9]),
    "steps": st.integers(2, 4),
    "strength": st.sampled_from([0.5, 0.8, 1.0]),
}
WAN = GUIDED | {"size": st.sampled_from([(64, 32, 5), (96, 64, 9), (32, 64, 1)])}
RUNS = {  # model, and what it starts from → drawn settings, and how its latents are decoded
    "5b": SCHEDULED | {"size": sizes([48, 64, 80], [48, 64], [1, 5, 9, 13]), "tiling": st.booleans()},
    "5b-i2v": SCHEDULED | {"size": st.just((96, 64, 9))},  # the size that it has positions for
    "1.5-i2v": SCHEDULED | {"size": st.sampled_from([(64, 48, 5), (96, 64, 9), (80, 64, 13)])},
    "2b from a video": FROM_VIDEO,
    "5b from a video": FROM_VIDEO,
    **dict.fromkeys(TEXT_TO_IMAGE, PICTURE),
    "svd": DRAWN | {
        "size": sizes([64, 128], [64], [2, 3, 4, 5]),
        "chunk": st.sampled_from([0, 2]),
        "more": st.fixed_dictionaries({
            "min_guidance_scale": st.just(1.0),
            "max_guidance_scale": st.sampled_from([1.0, 3.0]),
            "fps": st.sampled_from([7, 24]),
            "motion_bucket_id": st.integers(1, 255),
            "noise_aug_strength": st.sampled_from([0.0, 0.02]),
        }),
    },
    **dict.fromkeys(("wan", "wan-ti2v", "wan-two"), WAN),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
@settings(suppress_health_check=list(HealthCheck), max_examples=by_tier(8, 2))
@given(data=st.data())
def test_run_is_bit_equal_to_diffusers(case, data):
    model, _, video = case.partition(" from a ")
    drawn = data.draw(st.fixed_dictionaries(RUNS[case]))
    (width, height, frames), chunk, tiling = drawn.pop("size"), drawn.pop("chunk", 0), drawn.pop("tiling", False)
    handle, sampling = opened(model), SampleSettings(width, height, frames=frames, **drawn)
    start, kind = start_image(handle, width, height), None
    given = {} if model in TEXT_TO_IMAGE else {"num_frames": frames}
    if video:
        start = {"video": [picture(width, height, seed) for seed in range(frames)]}
        given, kind = {"strength": sampling.strength}, "CogVideoXVideoToVideoPipeline"
    if model == "svd":
        given |= {"decode_chunk_size": chunk or frames, **sampling.more}
    found, report = make(handle, sampling, chunk=chunk, tiling=tiling, **start)
    assert largest_difference(found, by_hand(handle, sampling, kind, tiling=tiling, **start, **given)) == 0
    assert len(report.steps) == sampling.computed_steps * report.calls_per_step and report.reruns == 0
    before = [stage.plan.component.value for stage in report.before]
    assert before == ["vae_encode", "image_encoder"][: 2 if model == "svd" else len(start)]


@pytest.mark.parametrize(("variant", "frames"), [*((each, 1) for each in TEXT_TO_IMAGE), ("2b", 9)])
@pytest.mark.parametrize(("positive", "negative"), [(PROMPT, ""), ("", "grey"), ("", "")])
def test_empty_prompt_is_bit_equal_to_diffusers(variant, frames, positive, negative):
    """diffusers takes an empty negative prompt for none."""
    sampling = SampleSettings(96, 64, steps=2, seed=5, frames=frames, guidance_scale=5.0)
    handle = opened(variant)
    encoded, _ = encode_prompts(handle, [positive, negative])
    found, _ = decode(handle, sample(handle, encoded[0], encoded[1], sampling)[0])
    given = {"prompt": positive, "negative_prompt": negative or None} | ({"num_frames": frames} if frames > 1 else {})
    assert largest_difference(found, by_hand(handle, sampling, **given)) == 0


VIDEO = {"guidance_scale": 6.0, "frames": 9}
SETTINGS = {
    "5b": VIDEO,
    "cogview3": {"guidance_scale": 5.0},
    "cogview4": {"guidance_scale": 5.0},
    "5b-i2v": VIDEO,
    "1.5-i2v": VIDEO,
    "svd": {"frames": 4, "more": {"max_guidance_scale": 3.0}},
}


@pytest.mark.parametrize("variant", SETTINGS)
def test_half_precision_is_near_fp32_and_continues_after_rerun(variant):
    exact, width = opened(variant), 96 if variant == "5b-i2v" else 64
    sampling, start = SampleSettings(width, 64, steps=3, seed=5, **SETTINGS[variant]), start_image(exact, width, 64)
    expected, _ = make(exact, sampling, **start)
    healthy, coarse = {}, 10 if variant == "svd" else 1  # its scheduler starts at 700 times the latents
    for precision, tolerance in (("bf16", 0.05), ("fp16", 0.005 * coarse)):
        frames, report = make(opened(variant, precision=precision), sampling, **start)
        healthy[precision] = (frames - expected).abs().mean()
        assert report.reruns == 0 and healthy[precision] < tolerance
    dtype = "fp16" if variant == "svd" else "bf16"  # in bf16 its steps are too coarse
    handle = opened(variant, precision=dtype)
    denoiser = handle.store.module(handle.family.denoiser, dtype)
    forward, calls = denoiser.forward, []

    @functools.wraps(forward)
    def fails_first(*args, **options):
        output = forward(*args, **options)
        calls.append(output[0].dtype)
        return (output[0] * float("nan"),) if len(calls) == 1 else output

    denoiser.forward = fails_first
    frames, report = make(handle, sampling, **start)
    assert [step.outcome for step in report.steps][:2] == ["rerun", "finite"]
    assert {step.dtype for step in report.steps[1:]} == {dtype}
    assert (frames - expected).abs().mean() < 2 * healthy[dtype]


def test_video_is_refused_by_model_that_starts_from_image():
    """tests/nodes/test_bad_input.py has other starts that do not fit."""
    handle, image = opened("5b-i2v"), picture(96, 64)
    with pytest.raises(BadInput, match="does not accept a start video"):
        sample(handle, None, None, SampleSettings(96, 64, 2, 0, frames=9), image=image, video=[image])
    assert handle.store.loaded() == {}


@pytest.mark.parametrize("variant", ["2b", "cogview3", "cogview4", "wan"])
def test_whole_prompt_is_tokenized_only_twice(monkeypatch, variant):
    """Once for the report, once for the model. diffusers would do it again to log what it cut off, which is slow."""
    handle = opened(variant)
    tokenizer, read = type(handle.store.unweighted("tokenizer")), []
    plain = tokenizer.__call__

    def counted(self, text, *args, **kwargs):
        read.append(text)
        return plain(self, text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    long = "a boat on a lake " * 100
    encode_prompts(handle, [long])
    assert ["".join(text).strip() for text in read if len("".join(text)) > 1000] == [long.strip()] * 2


@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_pictures_are_fitted_to_size_as_rgb(fit):
    for channels in (1, 3, 4):
        image = torch.rand(2, 30, 50, channels)
        found = fitted(image, 64, 48, fit)
        assert [p.size for p in found] == [(64, 48)] * 2 and {p.mode for p in found} == {"RGB"}
    (same,) = fitted(torch.full((1, 48, 64, 3), 0.5), 64, 48, fit)
    assert same.getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    ("variant", "size", "message"),
    [
        ("5b-i2v", (64, 48, 9), "makes 96×64 with 9 frames only, not 64×48 with 9"),
        ("5b-i2v", (96, 64, 13), "makes 96×64 with 9 frames only, not 96×64 with 13"),
        ("1.5-i2v", (112, 64, 9), "makes up to 96×64, not 112×64"),
        ("cogview3", (64, 64, 9), "makes images, not 9 frames"),
        ("2b", (64, 48, 50), "frames is 50, but must be"),
        ("wan", (90, 64, 9), "width is 90, but must be a multiple of 16"),
        ("wan", (96, 64, 8), r"frames is 8, but must be 4·k \+ 1"),
        ("wan-ti2v", (96, 80, 9), "Wan2.2-TI2V-5B makes widths that are multiples of 32 and heights of 32, not 96×80"),
    ],
)
def test_sizes_that_model_cannot_make_are_refused(variant, size, message):
    handle = opened(variant)
    width, height, frames = size
    with pytest.raises(BadSize, match=message):
        sample(handle, None, None, SampleSettings(width, height, 2, 0, frames=frames))
    assert handle.store.loaded() == {}


def test_falling_guidance_is_refused_only_if_it_ends_at_1():
    """diffusers accepts it as long as the last frame is guided. Else it fails in its first step."""
    handle, start = opened("svd"), picture(64, 64)

    def sampling(first, last):
        more = {"min_guidance_scale": first, "max_guidance_scale": last}
        return SampleSettings(64, 64, 1, 3, frames=2, more=more)

    with pytest.raises(
        BadInput, match="min_guidance_scale is 3, but max_guidance_scale is 1, which switches guidance off"
    ):
        sample(handle, None, None, sampling(3.0, 1.0), image=start)
    assert handle.store.loaded() == {}
    latents, _ = sample(handle, None, None, sampling(3.0, 2.0), image=start)
    assert torch.isfinite(latents).all()


def test_half_of_character_in_prompt_is_refused_before_weights_are_read():
    handle = opened("cogview4")
    with pytest.raises(BadInput, match="The prompt holds half a character"):
        encode_prompts(handle, ["a boat", "\ud83d"])
    assert handle.store.loaded() == {}
    assert encode_prompts(handle, ["a boat \U0001f525"])[0][0].isfinite().all()
