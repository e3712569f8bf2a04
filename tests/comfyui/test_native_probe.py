"""Numerics Probe (MODEL) on ComfyUI's own small models, in a current ComfyUI: SD1.5 and SVD layouts, and Flux."""

from __future__ import annotations

import native
import pytest
import torch

HOT = {  # the layer whose weights are too large
    "sd15": "input_blocks.1.0.in_layers.2",
    "sdxl": "input_blocks.1.0.in_layers.2",
    "svd": "input_blocks.1.0.in_layers.2",
    "flux": "double_blocks.0.txt_mlp.2",
    "wan": "blocks.0.ffn.0",
}
BLOCK = {"flux": "double_blocks.0", "wan": "blocks.0"}
STEPS = 3


@pytest.fixture(scope="module", params=native.WHOLE.values(), ids=native.WHOLE)
def ran(request: pytest.FixtureRequest, leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_probe_cases", tmp_path_factory.mktemp("native_probe"), *request.param, leg=leg)


@pytest.mark.parametrize("layout", HOT)
def test_it_names_the_layer_that_overflows_and_what_it_reaches(ran: native.Ran, layout: str) -> None:
    found = ran[f"overflowing/{layout}, facts"]
    worst = next(entry for entry in found["worst"] if entry["name"] == HOT[layout])
    assert worst["reach"] == pytest.approx(ran[f"overflowing/{layout}, reached"], rel=1e-3)
    assert worst["reach"] > 65504 and found["measured_steps"] == STEPS
    fp16 = next(verdict for verdict in found["verdicts"] if verdict["dtype"] == "fp16")
    assert fp16["fits"] and fp16["plan"] == "fp16 every layer wide"
    assert BLOCK.get(layout, "input_blocks.1") in fp16["reason"]


@pytest.mark.parametrize("layout", HOT)
def test_the_recommendation_applied_leads_to_no_rerun(ran: native.Ran, layout: str) -> None:
    found = ran[f"overflowing/{layout}, facts"]
    assert found["dtype"] == "bf16", "which it computes natively"
    text = ran[f"overflowing/{layout}, text"]
    assert "put NaN Guard (native) behind the model, with precision 'bf16'" in text
    for precision in ("bf16", "fp16"):
        said = ran[f"overflowing/{layout}, {precision} said"]
        assert f"{STEPS} steps, 0 reruns" in said[-1] and f"asked for {precision}" in said[-1]
        assert ran[f"overflowing/{layout}, {precision}"].isfinite().all()


@pytest.mark.parametrize("layout", HOT)
def test_its_profile_wired_to_the_guard_leads_to_no_rerun(ran: native.Ran, layout: str) -> None:
    assert ran[f"overflowing/{layout}, profile"] == "", "in bf16, nothing has to be wide"
    text = ran[f"overflowing/{layout}, text on sm75"]
    assert "fp16 every layer wide" in text and "`profile` wired into its `profile`" in text
    (said,) = ran[f"overflowing/{layout}, profiled said"]
    assert f"every layer wide; {STEPS} steps, 0 reruns" in said and "from a profile: " in said
    assert ran[f"overflowing/{layout}, profiled"].isfinite().all()


@pytest.mark.parametrize("layout", HOT)
def test_a_profile_of_another_card_is_left_alone_by_name(ran: native.Ran, layout: str) -> None:
    *_, said = ran[f"overflowing/{layout}, profiled elsewhere said"]
    here = "sm86" if "card/left" in ran else "cpu"
    assert f"the profile that was given is left alone: it is for sm75, and this is {here}" in said
    assert f"{STEPS} steps, 1 rerun" in said


@pytest.mark.parametrize("layout", HOT)
def test_the_picture_is_an_image_and_the_node_tells_each_step(ran: native.Ran, layout: str) -> None:
    picture, said = ran[f"overflowing/{layout}, picture"], ran[f"overflowing/{layout}, told on the node"]
    assert picture.ndim == 4 and picture.shape[-1] == 3 and picture.dtype == torch.float32
    assert picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0.05
    steps = [line.partition(" · ")[0] for line in said[:STEPS]]  # behind it, how long it will take yet
    assert steps == [f"step {step}/{STEPS}, measured in fp32" for step in range(1, STEPS + 1)]
    assert said[STEPS:] == [ran[f"overflowing/{layout}, text"]]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp32 computed in fp16", "fp8 computed in bf16"])
def test_what_fits_stays_as_it_is(ran: native.Ran, dtype: str) -> None:
    found = ran[f"healthy/{dtype}"]
    assert found["dtype"] == dtype.rpartition(" ")[2]
    assert all(verdict["fits"] for verdict in found["verdicts"])
    assert found["seconds"] > 0


@pytest.mark.parametrize("layout", ["sd15", "wan"])
def test_an_empty_latent_gets_the_size_that_ksampler_gives_it(ran: native.Ran, layout: str) -> None:
    shapes = ran[f"empty_latents/{layout}, sampled"]
    assert ran[f"empty_latents/{layout}, probed"] == shapes
    assert shapes[0][1:] == ran[f"empty_latents/{layout}, made"][1:]


def test_nothing_is_left_and_a_guard_before_it_does_not_count(ran: native.Ran) -> None:
    assert ran["leaves_nothing/same"] and ran["leaves_nothing/hooks"] == 0
    assert ran["leaves_nothing/worst"] == ran["leaves_nothing/unguarded worst"]
    assert len(ran["leaves_nothing/told"]) == STEPS + 1
    assert any("0 reruns" in text for text in ran["leaves_nothing/guarded said"])


def test_bad_input_is_named_and_the_next_run_works(ran: native.Ran) -> None:
    assert "'input_blocks.1.0.in_layers.2.weight' holds" in ran["hopeless/weight"]
    assert "was given latents with 512 non-finite values" in ran["hopeless/latents"]
    assert ran["hopeless/double"].startswith("BadInput: SD15 computes in float64")
    assert ran["hopeless/afterwards"] == "fp16"
