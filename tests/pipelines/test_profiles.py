"""Profiles: written completely or not at all, read strictly, and used only if they fit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest
import shared_models
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.folder import inspect
from comfyui_onediff_guard.pipelines.run.handle import identify
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.overrides import (
    NOTHING,
    BadProfile,
    PrecisionOverrides,
    Profile,
    ProfileFile,
    parse,
    read,
    read_all,
    write,
)
from comfyui_onediff_guard.trust.atomic_files import write_whole
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.text(min_size=1, max_size=300).filter(str.isprintable)
PARTS = st.lists(TEXTS).map(tuple)
LAYERS = ("transformer_blocks.3", "transformer_blocks.17")
PROFILE = Profile(
    model="CogVideoX 5b/fine:tune",
    weights="0" * 32,
    loras=(),
    architecture="sm75",
    dtype="fp16",
    versions={"torch": "2.13", "diffusers": "0.42"},
    learned=PrecisionOverrides(unquantised=LAYERS),
)


@given(
    st.builds(
        Profile,
        model=TEXTS,
        weights=st.text("0123456789abcdef", min_size=32, max_size=32),
        loras=st.lists(TEXTS).map(tuple),
        architecture=st.sampled_from([*ARCHITECTURES, "sm999", "gfx1100", "hpu"]),
        dtype=st.sampled_from(["fp16", "bf16"]),
        versions=st.dictionaries(TEXTS, TEXTS, max_size=20),
        learned=st.builds(PrecisionOverrides, unquantised=PARTS, all_layers_scaled=st.booleans()),
    )
)
def test_profile_is_equal_after_writing_and_reading(profile):
    assert parse(profile.text(), "it") == profile


FOLDERS = {
    "Persian": "\u0645\u062f\u0644\u200c\u0647\u0627",
    "emoji": "my \U0001f469\u200d\U0001f4bb model",
    "private and soft hyphen": "\ue000\xad",
    "wide spaces": "a\u3000b  c",
    "right-to-left mark": "\u200fa",
}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_profile_of_model_in_folder_with_unusual_name_is_read_again(model_folder, tmp_path, folder):
    """Some scripts and emoji join letters by invisible characters."""
    model = inspect(shared_models.copied(model_folder("2b"), tmp_path / folder), COGVIDEOX)
    profile = identify(model, "transformer", (), "sm75", "fp16")
    assert read(write(tmp_path / "kept", profile)) == profile


def test_each_model_has_one_profile_file_named_after_it(tmp_path):
    file = write(tmp_path / "new", PROFILE)
    assert file.name.startswith("CogVideoX-5b-fine-tune-sm75-fp16-") and read(file) == PROFILE
    again = write(tmp_path / "new", replace(PROFILE, learned=PrecisionOverrides(unquantised=("proj_out",))))
    assert again == file, "one model has one file"
    assert read(file).learned == PrecisionOverrides(unquantised=("proj_out",))
    other = write(tmp_path / "new", replace(PROFILE, loras=("x at 1",)))
    assert other != file
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".json"}


def test_failed_write_keeps_old_profile(tmp_path, monkeypatch):
    file = write(tmp_path, PROFILE)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, replace(PROFILE, learned=NOTHING))
    assert read(file) == PROFILE and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "a poem"}, "kind is a poem: input should be 'onediff-guard profile'"),
        ({"format": True}, "format is True: input should be 3"),
        ({"format": 2, "learned": {"scaled_blocks": ["a"]}}, "format is 2"),
        ({"learned": None}, "learned is None"),
        ({"learned": {"unquantised": "all"}}, "learned.unquantised is all"),
        ({"learned": {"unquantised": [""]}}, "learned.unquantised[0]"),
        ({"learned": {"unquantised": list(map(str, range(1001)))}}, "learned.unquantised is a list of 1001"),
        ({"learned": {"all_layers_scaled": "all"}}, "learned.all_layers_scaled is all"),
        ({"learned": {"fp16_error": -1}}, "learned.fp16_error is -1"),
        ({"dtype": "int4"}, "dtype is int4"),
        ({"architecture": "../../x"}, "architecture is ../../x: value error, not a known architecture"),
        ({"architecture": "SM75"}, "not a known architecture"),
        ({"versions": {"torch": 2}}, "versions.torch is 2"),
        ({"weights": ""}, "weights is"),
        ({"model": "a\x1b[2J"}, "a control character"),
        ({"model": "x" * 301}, "model is"),
    ],
)
def test_invalid_profile_is_refused_with_file_and_field(change, message, tmp_path):
    file = tmp_path / "found.json"
    file.write_text(json.dumps(json.loads(PROFILE.text()) | change))
    with pytest.raises(BadProfile, match=r"'found.json' cannot be used as a profile: .*Delete it") as error:
        read(file)
    assert message in str(error.value)


def test_profile_of_newer_version_is_not_overwritten(tmp_path):
    file = write(tmp_path, PROFILE)
    file.write_text(json.dumps(json.loads(PROFILE.text()) | {"format": 4, "learned": {"new": 1}}))
    newer = file.read_text()
    stored = ProfileFile(replace(PROFILE, learned=NOTHING), tmp_path)
    assert stored.load() == (NOTHING, (ANY,)) and "newer version" in stored.load()[1][0]
    stored.save(PROFILE.learned)
    assert file.read_text() == newer


@pytest.mark.parametrize("fields", [{}, {"stream_peak": 5e5}, {"stream_peak": "5e5"}, {"fp32_fallback_blocks": ["a"]}])
def test_unknown_fields_are_ignored_and_fields_may_be_missing(fields):
    learned = {"unquantised": PROFILE.learned.unquantised} | fields
    assert parse(json.dumps(json.loads(PROFILE.text()) | {"learned": learned}), "it") == PROFILE


@pytest.mark.parametrize("scaled", [False, True])
def test_whole_run_fp32_is_not_saved_in_profile(tmp_path, scaled):
    learned = replace(PROFILE.learned, all_layers_scaled=scaled)
    assert replace(learned, whole_run_fp32=True).to_share == learned
    profile = replace(PROFILE, learned=learned)
    assert read(write(tmp_path, profile)) == profile
    assert json.loads(profile.text())["learned"] == {"unquantised": [*LAYERS], "all_layers_scaled": scaled}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"learned": NaN}', "\x00"])
def test_text_that_is_not_a_profile_is_refused(text):
    with pytest.raises(BadProfile, match="'it' cannot be used as a profile"):
        parse(text, "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "1" * 32}, "another model's weights"),
        ({"loras": ("x at 1",)}, "other LoRAs"),
        ({"architecture": "sm80"}, "it is for sm80, but this is sm75"),
        ({"dtype": "bf16"}, "it is for bf16, but this is fp16"),
        ({"versions": {"torch": "2.9", "diffusers": "0.42"}}, "made with torch 2.9, but this is 2.13"),
        ({"versions": {}}, "torch of an unknown version"),
    ],
)
def test_misfit_of_profile_has_reason(change, message):
    assert PROFILE.misfit(replace(PROFILE, learned=NOTHING)) == ""
    assert message in replace(PROFILE, **change).misfit(replace(PROFILE, learned=NOTHING))


def test_model_is_identified_by_config_headers_and_weights(model_folder, tmp_path):
    def weights(folder):
        return identify(inspect(folder, COGVIDEOX), "transformer", (), "sm75", "fp16").weights

    folder = shared_models.copied(model_folder("2b"), tmp_path / "moved")
    assert weights(folder) == weights(model_folder("2b"))
    assert weights(model_folder("2b", "stream")) != weights(folder), "a fine-tune has its base's headers and sizes"
    assert weights(model_folder("5b")) != weights(folder)
    here = identify(inspect(folder, COGVIDEOX), "transformer", (), "sm75", "fp16")
    assert here.learned == NOTHING and set(here.versions) == {"torch", "diffusers"}


def test_unreadable_entries_of_profile_folder_are_reported(tmp_path):
    """Folders, broken links, pipes, large and binary files: each gives a BadProfile, and none blocks."""
    assert not list(read_all(tmp_path / "nowhere"))
    write(tmp_path, PROFILE)
    (tmp_path / "large.json").write_bytes(b" " * (2**20 + 1))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a-folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")
    found = {file.stem: profile for file, profile in read_all(tmp_path)}
    assert found.pop(PROFILE.name) == PROFILE
    assert len(found) == 5 + hasattr(os, "mkfifo") and all(isinstance(error, BadProfile) for error in found.values())


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_link_folder_or_pipe_is_not_replaced(kind, tmp_path):
    file, other = tmp_path / "shared.json", tmp_path / "other"
    other.write_text("as it was")
    if kind == "link":
        file.symlink_to(other)
    elif kind == "folder":
        file.mkdir()
    elif hasattr(os, "mkfifo"):
        os.mkfifo(file)
    else:
        pytest.skip("this system has no pipes with names")
    before = file.lstat().st_mode
    with pytest.raises(FileExistsError, match=r"'.*shared.json' is a link, a folder or a device"):
        write_whole(file, PROFILE.text().encode())
    assert file.lstat().st_mode == before and other.read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} == {"shared.json", "other"}


def test_file_name_keeps_long_model_name_up_to_limit():
    """As in earlier versions, whose files are found by their names."""
    for model in ("日本語のとても長いモデルフォルダの名前であり", "x" * 96 + "/y" * 20):
        assert replace(PROFILE, model=model).name.startswith(f"{model.replace('/', '-')}-sm75-fp16-")
    name = replace(PROFILE, model="../日本" * 100).name
    assert len(f"{name}.json".encode()) < 255 and "/" not in name


def test_model_in_renamed_folder_has_same_profile(tmp_path):
    """The folder was renamed, or the profile is another user's."""
    renamed = ProfileFile(replace(PROFILE, model="my copy", learned=NOTHING), tmp_path)
    assert renamed.load() == (NOTHING, ())
    file = write(tmp_path, PROFILE)
    assert renamed.load()[0] == PROFILE.learned
    renamed.save(PROFILE.learned)
    assert [*tmp_path.iterdir()] == [file]
    renamed.save(NOTHING)
    assert renamed.load()[0] == NOTHING and ProfileFile(PROFILE, tmp_path).load()[0] == PROFILE.learned
