"""`onediff-guard probe`: files, JSON output and invalid arguments."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import shared_models
from comfyui_onediff_guard.comfyui_host.host import profiles_directory
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED, NOTHING, read
from PIL import Image

SMALL = ("--steps", "1", "--width", "64", "--height", "48", "--frames", "9")


@pytest.fixture
def probe(console, tmp_path):
    return partial(console, "probe", "--out", tmp_path / "out")


def test_probe_writes_picture_text_and_profile(probe, model_folder, tmp_path):
    code, out, _ = probe("--model", str(model_folder("5b", "stream")), "--arch", "7.5", *SMALL)
    assert code == 0 and out.startswith("Recommended on sm75 (Turing): fp16 with overflow protection\n")
    picture, text, profile = (tmp_path / "out" / f"probe_00001_.{suffix}" for suffix in ("png", "txt", "json"))
    assert out.splitlines()[-3:] == [str(picture), str(text), str(profile)]
    assert Image.open(picture).width > 1000 and out.startswith(text.read_text())
    assert read(profile).architecture == "sm75"
    assert read(profile).learned == NOTHING, "protection from the start needs no profile"
    assert list(profiles_directory().glob("*.json")) == []
    probe("--model", str(model_folder("5b", "stream")), *SMALL)
    assert (tmp_path / "out" / "probe_00002_.png").is_file(), "no file is overwritten"


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (80, 60), (90, 120, 30)).save(tmp_path / "start.png")
    return "--image", str(tmp_path / "start.png"), "--steps", "1", "--width", "64", "--height", "64", "--frames", "2"


def test_json_output_contains_saved_profile(probe, model_folder, image):
    code, out, _ = probe("--model", str(model_folder("svd", "inside")), "--json", "--save", *image, "--arch", "sm75")
    answer = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and answer["status"] == "done" and answer["plan"] == f"fp16 with {ALL_LAYERS_SCALED}"
    assert [Path(file).suffix for file in answer["files"]] == [".png", ".txt", ".json"]
    (file,) = profiles_directory().glob("*.json")
    assert file.read_text() == answer["profile"]


@pytest.mark.parametrize("stored", ["folder", "file"])
def test_svd_probe_needs_start_image(probe, model_folder, image, stored):
    model = str(model_folder("svd") if stored == "folder" else shared_models.svd_file(image=224, patch=56))
    assert probe("--model", model, *SMALL)[0] == 2
    code, out, _ = probe("--model", model, *image, "--arch", "sm80")
    assert code == 0 and out.startswith("Recommended on sm80 (Ampere): fp16 plain")


def test_fp32_probe_writes_no_profile(probe, model_folder, tmp_path):
    code, out, _ = probe("--model", str(model_folder("2b")), "--precision", "fp32", *SMALL)
    assert code == 0 and ": fp32" in out.splitlines()[0]
    assert sorted(file.suffix for file in (tmp_path / "out").iterdir()) == [".png", ".txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere/to/be-found"), "There is no 'nowhere/to/be-found'"),
        (("--model", "MODEL", "--arch", "sm7"), "'sm7' is unknown"),
        (("--model", "MODEL", "--steps", "0"), "steps"),
        (("--model", "MODEL", "--image", "picture.png"), "does not start from an image. Leave out --image."),
    ],
)
def test_invalid_arguments_are_rejected(probe, model_folder, arguments, message):
    resolved = [str(model_folder("2b")) if argument == "MODEL" else argument for argument in arguments]
    code, out, err = probe(*resolved)
    assert (code, out) == (2, "") and message in err
    answer = json.loads(probe(*resolved, "--json")[1])
    assert answer["status"] == "error" and message in answer["error"]
