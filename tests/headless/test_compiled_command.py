"""`onediff-guard compiled`, and what `doctor` says of the compile cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.host import COMPILED_VARIABLE, compiled_directory
from comfyui_onediff_guard.pipelines.compile.cache import IMPORTED, INDUCTOR, SAVED, SUFFIX, Target, exportable, write
from comfyui_onediff_guard.precision.machine import platform_of
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(COMPILED_VARIABLE, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


@pytest.fixture
def command(console):
    return partial(console, "compiled")


def target(model="CogVideoX-5B", **machine):
    here = platform_of(torch.device("cpu"), "cpu")
    return Target(model, "0" * 16, "bf16", "no overflow protection, half accumulation off", replace(here, **machine))


def keep(where, what=None):
    """The file of compiled code in a target's folder, as a run leaves it."""
    what = what or target()
    kept = where / f"{what.name}{SUFFIX}"
    kept.mkdir(parents=True)
    write(kept / SAVED, what, b"artifacts")
    return kept / SAVED


def test_list_names_good_ones_and_bad_ones(folder, command):
    code, out, _ = command("list")
    assert code == 0 and f"No compiled code in {folder}" in out
    whole = keep(folder)
    os.utime(whole.parent, times=(1, 1))
    (folder / f"broken{SUFFIX}").mkdir()
    (folder / f"broken{SUFFIX}" / SAVED).write_bytes(b"no header")
    _, out, _ = command("list")
    assert f"{target().name}\n    0.0 MB; CogVideoX-5B, bf16, no overflow protection, half accumulation off; " in out
    assert torch.__version__ in out and "is no compiled code that can be used" in out
    told = json.loads(command("list", "--json")[1])["compiled"]
    assert [entry["name"] for entry in told] == ["broken", target().name], "used last first"
    assert "error" in told[0] and told[1]["for"]["machine"]["torch"] == torch.__version__
    assert told[1]["bytes"] == whole.stat().st_size


def test_export_and_import_elsewhere_and_export_again(folder, command, tmp_path):
    keep(folder)
    shared, again = tmp_path / "shared", tmp_path / "again"
    assert command("export", "CogVideoX", shared)[:2] == (0, f"{shared}\n")
    code, out, err = command("--dir", tmp_path / "other", "import", shared)
    assert (code, out) == (0, f"{target().name}\n") and "CogVideoX-5B, bf16" in err
    (kept,) = (tmp_path / "other").iterdir()
    assert [path.name for path in kept.iterdir()] == [IMPORTED] and exportable(kept) == (target(), b"artifacts")
    assert command("--dir", tmp_path / "other", "export", "CogVideoX", again)[0] == 0
    assert again.read_bytes() == shared.read_bytes()


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
    code, _, err = command("import", keep(tmp_path / "theirs", target(**machine)))
    assert code == 2 and says in err and "Export it on a machine like this one" in err and not folder.exists()


DAMAGES = {
    "nothing": (lambda _: b"", "is no compiled code"),
    "no header": (lambda data: data.partition(b"\n")[2], "is no compiled code"),
    "cut short": (lambda data: data[:-1], "it is damaged, or not whole"),
    "a bit": (lambda data: data[:-1] + b"z", "it is damaged, or not whole"),
    "another kind": (lambda data: data.replace(b"onediff-guard", b"onediff"), "kind is "),
    "another format": (lambda data: data.replace(b'"format": 2', b'"format": 9'), "format is 9: input should be 2"),
    "not for anything": (lambda data: data.replace(b'"machine"', b'"engine"'), "for.machine is missing"),
    "a long header": (lambda data: b" " * 2**17 + data, "has more than 65,536 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_neither_imported_nor_exported(folder, command, tmp_path, damage):
    change, says = DAMAGES[damage]
    file, kept = keep(tmp_path / "theirs"), keep(folder)
    for each in (file, kept):
        each.write_bytes(change(each.read_bytes()))
    code, _, err = command("import", file)
    assert code == 2 and says in err and not (kept.parent / IMPORTED).exists()
    code, _, err = command("export", "CogVideoX", tmp_path / "shared")
    assert code == 2 and says in err and not (tmp_path / "shared").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_not_waited_for(folder, command):
    os.mkfifo(keep(folder).with_name(IMPORTED))
    assert "it is no file" in command("list")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "Cog", "file"], 2, "must start with 'Cog', and these do: CogVideoX-2B-cpu-bf16-"),
        (["export", "x", "file"], 2, "these do: none. Looked in"),
        (["export", "CogVideoX-2B", "no/such/folder/file"], 5, "could not be written"),
        (["import", "absent"], 2, "'absent' cannot be read"),
    ],
)
def test_bad_input(folder, command, arguments, code, says):
    keep(folder)
    keep(folder, target("CogVideoX-2B"))
    found, _, err = command(*arguments)
    assert found == code and says in err


def test_clear_deletes_all_or_those_of_a_name(folder, command):
    for model in ("CogVideoX-5B", "CogVideoX-2B", "SVD"):
        keep(folder, target(model))
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
def test_doctor_says_where_and_how_much(folder, monkeypatch, console, variables, says):
    monkeypatch.delenv(INDUCTOR, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    keep(folder)
    code, out, _ = console("doctor", "--json")
    assert code == 0
    told = json.loads(out)["compile_cache"]
    assert says in told
    assert "compile cache" in console("doctor", "--verbose")[1]
