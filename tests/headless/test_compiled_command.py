"""`onediff-guard compiled`, and what `doctor` reports of the compile cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.host import COMPILED_VARIABLE
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


def save(folder, key=None):
    """Write compiled code into a target's folder, as a run does, and return the file."""
    key = key or target()
    kept = folder / f"{key.name}{SUFFIX}"
    kept.mkdir(parents=True)
    write(kept / SAVED, key, b"artifacts")
    return kept / SAVED


def test_list_names_usable_and_broken_entries(folder, command):
    code, out, _ = command("list")
    assert code == 0 and f"No compiled code in {folder}" in out
    whole = save(folder)
    os.utime(whole.parent, times=(1, 1))
    (folder / f"broken{SUFFIX}").mkdir()
    (folder / f"broken{SUFFIX}" / SAVED).write_bytes(b"no header")
    _, out, _ = command("list")
    assert f"{target().name}\n    0.0 MB; CogVideoX-5B, bf16, no overflow protection, half accumulation off; " in out
    assert torch.__version__ in out and "cannot be used as compiled code" in out
    entries = json.loads(command("list", "--json")[1])["compiled"]
    assert [entry["name"] for entry in entries] == ["broken", target().name], "most recently used first"
    assert "error" in entries[0] and entries[1]["for"]["machine"]["torch"] == torch.__version__
    assert entries[1]["bytes"] == whole.stat().st_size


def test_exported_code_is_unchanged_after_import_and_export(folder, command, tmp_path):
    save(folder)
    shared, again = tmp_path / "shared", tmp_path / "again"
    assert command("export", "CogVideoX", shared)[:2] == (0, f"{shared}\n")
    code, out, err = command("--dir", tmp_path / "other", "import", shared)
    assert (code, out) == (0, f"{target().name}\n") and "CogVideoX-5B, bf16" in err
    (kept,) = (tmp_path / "other").iterdir()
    assert [path.name for path in kept.iterdir()] == [IMPORTED] and exportable(kept) == (target(), b"artifacts")
    assert command("--dir", tmp_path / "other", "export", "CogVideoX", again)[0] == 0
    assert again.read_bytes() == shared.read_bytes()


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"torch": "2.5.0+cu124"}, f"it is for torch '2.5.0+cu124', but this is '{torch.__version__}'"),
        ({"architecture": "sm90", "device": "NVIDIA H200"}, "it is for architecture 'sm90', but this is 'cpu'"),
        ({"device": "another CPU"}, "it is for device 'another CPU', but this is "),
        ({"python": "cpython-310"}, "it is for python 'cpython-310'"),
        ({"system": "Windows AMD64"}, "it is for system 'Windows AMD64'"),
    ],
)
def test_code_for_another_machine_is_not_imported(folder, command, tmp_path, machine, message):
    code, _, err = command("import", save(tmp_path / "theirs", target(**machine)))
    assert code == 2 and message in err and "Export it on a machine like this one" in err and not folder.exists()


DAMAGES = {
    "empty": (lambda _: b"", "cannot be used as compiled code"),
    "no header": (lambda data: data.partition(b"\n")[2], "cannot be used as compiled code"),
    "truncated": (lambda data: data[:-1], "it is damaged or incomplete"),
    "changed byte": (lambda data: data[:-1] + b"z", "it is damaged or incomplete"),
    "another kind": (lambda data: data.replace(b"onediff-guard", b"onediff"), "kind is "),
    "another format": (lambda data: data.replace(b'"format": 2', b'"format": 9'), "format is 9: input should be 2"),
    "no machine": (lambda data: data.replace(b'"machine"', b'"engine"'), "for.machine is missing"),
    "long header": (lambda data: b" " * 2**17 + data, "has more than 65,536 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_neither_imported_nor_exported(folder, command, tmp_path, damage):
    change, message = DAMAGES[damage]
    file, kept = save(tmp_path / "theirs"), save(folder)
    for each in (file, kept):
        each.write_bytes(change(each.read_bytes()))
    code, _, err = command("import", file)
    assert code == 2 and message in err and not (kept.parent / IMPORTED).exists()
    code, _, err = command("export", "CogVideoX", tmp_path / "shared")
    assert code == 2 and message in err and not (tmp_path / "shared").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_list_does_not_wait_for_named_pipe(folder, command):
    os.mkfifo(save(folder).with_name(IMPORTED))
    assert "it is not a file" in command("list")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "Cog", "file"], 2, "'Cog' must match one folder of compiled code. Matches: CogVideoX-2B-cpu-bf16-"),
        (["export", "x", "file"], 2, "Matches: none. Looked in"),
        (["export", "CogVideoX-2B", "no/such/folder/file"], 5, "Cannot write the file"),
        (["import", "absent"], 2, "'absent' cannot be read"),
    ],
)
def test_invalid_arguments_are_rejected(folder, command, arguments, code, message):
    save(folder)
    save(folder, target("CogVideoX-2B"))
    found, _, err = command(*arguments)
    assert found == code and message in err


def test_clear_deletes_all_entries_or_one_name(folder, command):
    for model in ("CogVideoX-5B", "CogVideoX-2B", "SVD"):
        save(folder, target(model))
    (folder / "notes.txt").write_text("not ours")
    assert command("clear", "SVD")[:2] == (0, f"{target('SVD').name}\n")
    assert len(list(folder.iterdir())) == 3
    assert len(command("clear")[1].splitlines()) == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_help_warns_to_import_only_from_trusted_people(command, capsys):
    for arguments in (["--help"], ["import", "--help"]):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert "Import it only from people you trust" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({LIMIT_VARIABLE: "3"}, "compiled, 1 kept, "),
        ({LIMIT_VARIABLE: "0"}, f"off ({LIMIT_VARIABLE}=0)"),
        ({LIMIT_VARIABLE: "-1"}, f"{LIMIT_VARIABLE} is not used"),
        (
            {LIMIT_VARIABLE: "3", INDUCTOR: "/elsewhere"},
            f"inductor's own folder, as you exported {INDUCTOR}=/elsewhere",
        ),
    ],
)
def test_doctor_reports_compile_cache_state(folder, monkeypatch, console, variables, message):
    monkeypatch.delenv(INDUCTOR, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    save(folder)
    code, out, _ = console("doctor", "--json")
    assert code == 0
    state = json.loads(out)["compile_cache"]
    assert message in state
    assert "compile cache" in console("doctor", "--verbose")[1]
