"""`onediff-guard profile`: list, show, export and import."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from comfyui_onediff_guard.comfyui_host.host import PROFILES_VARIABLE, profiles_directory
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides, Profile, read, write

PROFILE = Profile(
    "CogVideoX-5b",
    "0" * 32,
    (),
    "sm75",
    "fp16",
    {"torch": "2.13"},
    PrecisionOverrides(unquantised=("blocks.3",)),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def command(console):
    return partial(console, "profile")


def test_list_names_usable_and_broken_profiles(folder, command):
    code, out, _ = command("list")
    assert code == 0 and f"No profiles in {folder}" in out
    write(folder, PROFILE)
    (folder / "broken.json").write_text("{")
    _, out, _ = command("list")
    assert "CogVideoX-5b, sm75, fp16; 'blocks.3' unquantised" in out
    assert "broken\n    'broken.json' cannot be used as a profile" in out
    answer = json.loads(command("list", "--json")[1])
    assert [entry["name"] for entry in answer["profiles"]] == [PROFILE.name, "broken"]
    assert answer["profiles"][0]["learned"]["unquantised"] == ["blocks.3"] and "error" in answer["profiles"][1]


def test_show_prints_profile_text(folder, command):
    write(folder, PROFILE)
    code, out, _ = command("show", "CogVideoX")
    assert code == 0 and out == PROFILE.text()


def test_exported_profile_can_be_imported(folder, command, tmp_path):
    write(folder, PROFILE)
    shared = tmp_path / "shared.json"
    assert command("export", "CogVideoX", shared)[:2] == (0, f"{shared}\n")
    code, out, err = command("--dir", tmp_path / "other", "import", shared)
    assert (code, out) == (0, f"{PROFILE.name}\n") and "'blocks.3' unquantised" in err
    assert read(tmp_path / "other" / f"{PROFILE.name}.json") == PROFILE


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "Cog"], 2, "'Cog' must match one profile. Matches: CogVideoX-5b-sm75-fp16-"),
        (["show", "x"], 2, "Matches: none. Looked in"),
        (["export", "CogVideoX-5b-sm80", "no/such/folder/file.json"], 5, "Cannot write the file"),
        (["export", "CogVideoX-5b-sm80", "/dev/null"], 5, "'/dev/null' is a link, a folder or a device"),
        (["import", "absent.json"], 2, "The profile 'absent.json' cannot be read"),
    ],
)
def test_invalid_arguments_are_rejected(folder, command, arguments, code, message):
    write(folder, PROFILE)
    write(folder, replace(PROFILE, architecture="sm80"))
    found, _, err = command(*arguments)
    assert found == code and message in err


def test_long_list_of_names_is_shortened(folder, command):
    folder.mkdir()
    for number in range(300):
        (folder / f"x{number:03}.json").touch()
    _, _, err = command("show", "x")
    assert "x000, x001" in err and "and 290 more" in err and len(err) < 500 + len(str(folder))


def test_profiles_folder_comes_from_variable_or_home(folder, monkeypatch, tmp_path):
    assert profiles_directory() == folder
    monkeypatch.delenv(PROFILES_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiles_directory() == tmp_path / ".onediff-guard" / "profiles"
