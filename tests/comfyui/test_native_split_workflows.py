"""The shipped workflows for ComfyUI's own models that come in several files: Qwen-Image, Z-Image, CogVideoX."""

from __future__ import annotations

import native
import pytest

NAMES = ("native_cogvideox_text_to_video", "native_qwen_image_text_to_image", "native_z_image_text_to_image")
SHAPES = dict(zip(NAMES, ((9, 64, 64, 3), (1, 64, 64, 3), (1, 64, 64, 3)), strict=True))

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_split_cases", tmp_path_factory.mktemp("native_split"), leg=leg)


def there(ran: native.Ran, name: str) -> None:
    if lacking := ran[f"validated/{name}, missing"]:
        pytest.skip(f"this ComfyUI has no {', '.join(lacking)}")


@pytest.mark.parametrize("name", NAMES)
def test_comfyui_finds_nothing_wrong_with_it(ran: native.Ran, name: str) -> None:
    there(ran, name)
    assert ran[f"validated/{name}"] == [True, None, {}]


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_is_the_same_where_fp16_stays(ran: native.Ran, name: str) -> None:
    there(ran, name)
    plain, guarded = (ran[f"ran/{name}, healthy, {how}"] for how in ("plain", "cpu"))
    assert plain.reshape(-1, *plain.shape[-3:]).shape == SHAPES[name]
    assert plain.isfinite().all() and plain.std() > 0.01 and plain.equal(guarded)


@pytest.mark.parametrize("card", ["cpu", "sm75"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_overflows_is_right_as_shipped(ran: native.Ran, name: str, card: str) -> None:
    there(ran, name)
    plain, guarded, fp32 = (ran[f"ran/{name}, hot, {how}"] for how in ("plain", card, "fp32"))
    assert fp32.isfinite().all() and fp32.std() > 0.01
    plain_is_off, guarded_is_off = ((made - fp32).norm() / fp32.norm() for made in (plain, guarded))
    assert not plain_is_off <= 0.05, "NaN, or wrong where the model clips"
    assert guarded_is_off <= 0.02
    (model,) = {text for text in ran[f"ran/{name}, hot, {card}, said"] if "2 steps" in text and "VAE" not in text}
    assert ("every layer wide; 2 steps, 0 reruns" in model) is (card == "sm75"), model


def test_what_the_note_says_of_cogvideox_gives_the_file_that_comfyui_takes(ran: native.Ran) -> None:
    there(ran, NAMES[0])
    assert ran["note/class"] == "CogVideoX"
    assert native.difference(ran["note/ours"], ran["note/theirs"]) <= 1e-5
