"""`onediff-guard compiled`, and what `doctor` says of the compile cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from archives import rewrite
from comfyui_onediff_guard.nodes.host import COMPILED_VARIABLE, compiled_directory
from comfyui_onediff_guard.pipelines.compile_cache import INDUCTOR, platform_of
from comfyui_onediff_guard.pipelines.compiled_code import SUFFIX, Target, check, pack, unpack
from comfyui_onediff_guard.pipelines.keeping import LIMIT_VARIABLE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(COMPILED_VARIABLE, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


@pytest.fixture
def command(console):
    return partial(console, "compiled")


def target(model="CogVideoX-5B", **machine):
    here = platform_of(torch.device("cpu"), "cpu")
    return Target(model, "0" * 16, "bf16", "folded, half accumulation off", replace(here, **machine))


def keep(where, what, tmp_path):
    """A file of compiled code for `what`, as a run leaves it."""
    written = tmp_path / "written" / what.name
    (written / "ab").mkdir(parents=True)
    (written / "ab" / "kernel.main.so").write_bytes(b"\x7fELF" + bytes(2000))
    where.mkdir(parents=True, exist_ok=True)
    file = where / f"{what.name}{SUFFIX}"
    pack(written, what, file)
    return file


def test_list_names_good_ones_and_bad_ones(folder, command, tmp_path):
    code, out, _ = command("list")
    assert code == 0 and f"No compiled code in {folder}" in out
    whole = keep(folder, target(), tmp_path)
    os.utime(whole, times=(1, 1))
    (folder / f"broken{SUFFIX}").write_bytes(b"no archive")
    _, out, _ = command("list")
    assert f"{target().name}\n    0.0 MB; CogVideoX-5B, bf16, folded, half accumulation off; " in out
    assert f"torch {torch.__version__}" in out and "is no compiled code that can be used" in out
    told = json.loads(command("list", "--json")[1])["compiled"]
    assert [entry["name"] for entry in told] == ["broken", target().name], "used last first"
    assert "error" in told[0] and told[1]["for"]["machine"]["torch"] == torch.__version__
    assert told[1]["bytes"] == whole.stat().st_size


def test_export_and_import_elsewhere(folder, command, tmp_path):
    keep(folder, target(), tmp_path)
    shared = tmp_path / "shared.zip"
    assert command("export", "CogVideoX", shared)[:2] == (0, f"{shared}\n")
    code, out, err = command("--dir", tmp_path / "other", "import", shared)
    assert (code, out) == (0, f"{target().name}\n") and "CogVideoX-5B, bf16" in err
    (file,) = (tmp_path / "other").iterdir()
    unpack(file, target(), tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "ab" / "kernel.main.so").read_bytes() == b"\x7fELF" + bytes(2000)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"torch": "2.5.0+cu124"}, f"it is for torch '2.5.0+cu124', and this is '{torch.__version__}'"),
        ({"architecture": "sm90", "device": "NVIDIA H200"}, "it is for architecture 'sm90', and this is 'cpu'"),
        ({"device": "another CPU"}, "it is for device 'another CPU', and this is "),
        ({"python": "cpython-310"}, "it is for python 'cpython-310'"),
        ({"system": "Windows AMD64"}, "it is for system 'Windows AMD64'"),
    ],
)
def test_what_is_for_another_machine_is_not_imported(folder, command, tmp_path, machine, says):
    file = keep(tmp_path / "theirs", target(**machine), tmp_path)
    code, _, err = command("import", file)
    assert code == 2 and says in err and "Export it on a machine like this one" in err and not folder.exists()


def renamed(contents, name):
    facts = json.loads(contents["manifest.json"])
    facts["files"] = {name: facts["files"]["ab/kernel.main.so"]}
    return {"manifest.json": json.dumps(facts).encode(), name: contents["ab/kernel.main.so"]}


DAMAGES = {
    "a kernel that was changed": (lambda c: c | {"ab/kernel.main.so": b"evil"}, "is not what it was"),
    "a file that nobody named": (lambda c: c | {"cd/evil.so": b"evil"}, "its files are not those that"),
    "a file that is missing": (lambda c: {"manifest.json": c["manifest.json"]}, "its files are not those that"),
    "no manifest": (lambda c: {"ab/kernel.main.so": c["ab/kernel.main.so"]}, "it has no manifest.json"),
    "another kind": (lambda c: c | {"manifest.json": b"{}"}, "its 'kind' is not"),
    "another format": (
        lambda c: c | {"manifest.json": c["manifest.json"].replace(b'"format": 1', b'"format": 9')},
        "its format is 9, and this version reads 1",
    ),
    "not for anything": (
        lambda c: c | {"manifest.json": c["manifest.json"].replace(b'"machine"', b'"engine"')},
        "it does not say what it is for",
    ),
    "above the folder": (lambda c: renamed(c, "../evil.so"), "would leave the folder"),
    "an absolute path": (lambda c: renamed(c, "/tmp/evil.so"), "would leave the folder"),
    "a drive of Windows": (lambda c: renamed(c, "C:evil.so"), "would leave the folder"),
    "Windows' separator": (lambda c: renamed(c, "..\\evil.so"), "would leave the folder"),
    "a path that turns back": (lambda c: renamed(c, "ab/../../evil.so"), "would leave the folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_not_imported(folder, command, tmp_path, damage):
    change, says = DAMAGES[damage]
    file = keep(tmp_path / "theirs", target(), tmp_path)
    rewrite(file, change)
    code, _, err = command("import", file)
    assert code == 2 and says in err and not folder.exists()
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "Cog", "file.zip"], 2, "must start with 'Cog', and these do: CogVideoX-2B-cpu-bf16-"),
        (["export", "x", "file.zip"], 2, "these do: none. Looked in"),
        (["export", "CogVideoX-2B", "no/such/folder/file.zip"], 5, "could not be written"),
        (["import", "absent.zip"], 2, "'absent.zip' cannot be read"),
    ],
)
def test_bad_input(folder, command, tmp_path, arguments, code, says):
    keep(folder, target(), tmp_path)
    keep(folder, target("CogVideoX-2B"), tmp_path)
    found, _, err = command(*arguments)
    assert found == code and says in err


def test_a_damaged_one_is_not_exported(folder, command, tmp_path):
    file = keep(folder, target(), tmp_path)
    file.write_bytes(file.read_bytes()[:-30])
    code, _, err = command("export", "CogVideoX", tmp_path / "shared.zip")
    assert code == 2 and "is no compiled code that can be used" in err and not (tmp_path / "shared.zip").exists()


def test_clear_deletes_all_or_those_of_a_name(folder, command, tmp_path):
    for model in ("CogVideoX-5B", "CogVideoX-2B", "SVD"):
        keep(folder, target(model), tmp_path)
    (folder / "notes.txt").write_text("not ours")
    assert command("clear", "SVD")[:2] == (0, f"{target('SVD').name}\n")
    assert len(list(folder.iterdir())) == 3
    assert len(command("clear")[1].splitlines()) == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_help_says_whom_to_trust(command, capsys):
    for arguments in (["--help"], ["import", "--help"]):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert "Import it only from people whom you trust" in " ".join(capsys.readouterr().out.split())


def test_where_compiled_code_is(folder, monkeypatch, tmp_path):
    assert compiled_directory() == folder
    monkeypatch.delenv(COMPILED_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled_directory() == tmp_path / ".onediff-guard" / "compiled"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({LIMIT_VARIABLE: "3"}, "compiled, 1 kept, "),
        ({LIMIT_VARIABLE: "0"}, f"off ({LIMIT_VARIABLE}=0)"),
        ({LIMIT_VARIABLE: "-1"}, f"{LIMIT_VARIABLE} is not used"),
        ({LIMIT_VARIABLE: "3", INDUCTOR: "/elsewhere"}, f"inductor's own, {INDUCTOR}=/elsewhere, as it was exported"),
    ],
)
def test_doctor_says_where_and_how_much(folder, monkeypatch, console, tmp_path, variables, says):
    monkeypatch.delenv(INDUCTOR, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    keep(folder, target(), tmp_path)
    code, out, _ = console("doctor", "--json")
    assert code == 0
    told = json.loads(out)["compile_cache"]
    assert says in told
    assert "compile cache" in console("doctor")[1]
    assert check(folder / f"{target().name}{SUFFIX}") == target(), "asking changes nothing"
