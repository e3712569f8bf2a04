"""`onediff-guard compiled`, and what `doctor` says of the compile cache."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from archives import rewrite
from comfyui_onediff_guard.comfyui_host.host import COMPILED_VARIABLE, compiled_directory
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR
from comfyui_onediff_guard.pipelines.compile.code import SUFFIX, check, pack, unpack
from comfyui_onediff_guard.pipelines.compile.target import Target
from comfyui_onediff_guard.pipelines.errors import BadCompiled
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
    return Target(model, "0" * 16, "bf16", "narrow stream, half accumulation off", replace(here, **machine))


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
    assert f"{target().name}\n    0.0 MB; CogVideoX-5B, bf16, narrow stream, half accumulation off; " in out
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


def with_also(contents, name):
    facts = json.loads(contents["manifest.json"])
    facts["files"][name] = hashlib.sha256(b"evil").hexdigest()
    return contents | {"manifest.json": json.dumps(facts).encode(), name: b"evil"}


DAMAGES = {
    "a kernel that was changed": (lambda c: c | {"ab/kernel.main.so": b"evil"}, "is not what it was"),
    "a file that nobody named": (lambda c: c | {"cd/evil.so": b"evil"}, "its files are not those that"),
    "a file that is missing": (lambda c: {"manifest.json": c["manifest.json"]}, "its files are not those that"),
    "no manifest": (lambda c: {"ab/kernel.main.so": c["ab/kernel.main.so"]}, "it has no manifest.json"),
    "another kind": (lambda c: c | {"manifest.json": b"{}"}, "manifest.json cannot be used: kind is missing"),
    "another format": (
        lambda c: c | {"manifest.json": c["manifest.json"].replace(b'"format": 1', b'"format": 9')},
        "format is 9: input should be 1",
    ),
    "not for anything": (
        lambda c: c | {"manifest.json": c["manifest.json"].replace(b'"machine"', b'"engine"')},
        "for.machine is missing",
    ),
    "above the folder": (lambda c: renamed(c, "../evil.so"), "leads out of its folder"),
    "an absolute path": (lambda c: renamed(c, "/tmp/evil.so"), "leads out of its folder"),
    "a drive of Windows": (lambda c: renamed(c, "C:evil.so"), "leads out of its folder"),
    "Windows' separator": (lambda c: renamed(c, "..\\evil.so"), "leads out of its folder"),
    "a path with a detour": (lambda c: renamed(c, "ab//evil.so"), "would be elsewhere"),
    "a control character": (lambda c: renamed(c, "ab/evil\n.so"), "holds a control character"),
    "a name that is too long": (lambda c: renamed(c, "e" * 300), "too long for a path"),
    "a file that is a folder": (
        lambda c: with_also(with_also(c, "evil"), "evil/evil.so"),
        "two of its files would be one",
    ),
    "names that differ in case": (
        lambda c: with_also(with_also(c, "evil.so"), "EVIL.so"),
        "two of its files would be one",
    ),
    "a path that turns back": (lambda c: renamed(c, "ab/../../evil.so"), "leads out of its folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_not_imported(folder, command, tmp_path, damage):
    change, says = DAMAGES[damage]
    file = keep(tmp_path / "theirs", target(), tmp_path)
    rewrite(file, change)
    code, _, err = command("import", file)
    assert code == 2 and says in err and not folder.exists()
    assert not list(tmp_path.rglob("evil*"))


def packed(file, **entries):
    """entries: a name, and a function that writes its content in pieces."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, write in entries.items():
            with archive.open(name, "w") as stream:
                write(stream)


def test_a_manifest_that_swells_is_not_read_to_its_end(folder, command, monkeypatch):
    """300 MB of spaces, 0.3 MB as they are sent."""
    folder.mkdir()
    packed(folder / f"swollen{SUFFIX}", **{"manifest.json": lambda to: [to.write(bytes(2**20)) for _ in range(300)]})
    read = []
    reading = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: read.append(found := reading(self, n)) or found)
    code, out, _ = command("list")
    assert code == 0 and "its manifest.json is longer than 16,777,216 bytes" in out
    assert sum(map(len, read)) < 20 * 2**20


def test_a_list_of_too_many_files_is_not_taken_in(folder, command):
    folder.mkdir()
    packed(folder / f"long{SUFFIX}", **{f"{number:04}{'x' * 60_000}": lambda to: None for number in range(300)})
    code, out, _ = command("list")
    assert code == 0 and "it lists its files in more than 16,777,216 bytes" in out


@pytest.mark.parametrize("how", ["lzma", "bzip2", "encrypted"])
def test_what_no_run_packs_so_is_refused(folder, command, tmp_path, how):
    file = keep(tmp_path / "theirs", target(), tmp_path)
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    method = {"lzma": zipfile.ZIP_LZMA, "bzip2": zipfile.ZIP_BZIP2}.get(how, zipfile.ZIP_STORED)
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    if how == "encrypted":
        at = file.read_bytes().rindex(b"PK\x01\x02")
        file.write_bytes(file.read_bytes()[: at + 8] + b"\x01" + file.read_bytes()[at + 9 :])
    code, _, err = command("import", file)
    assert code == 2 and "is encrypted, or compressed in another way" in err and not folder.exists()


def test_sizes_that_a_header_lies_about_change_nothing(tmp_path):
    """Fewer bytes are written than are sent, and the SHA-256 finds it."""
    file = keep(tmp_path / "theirs", target(), tmp_path)
    data = bytearray(file.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = (10).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(BadCompiled, match=r"is no compiled code that can be used|is not what it was"):
        unpack(file, target(), tmp_path / "unpacked")
    assert not [path for path in (tmp_path / "unpacked").rglob("*") if path.is_file()]


def test_nothing_is_written_through_a_link_of_the_folder(tmp_path):
    file = keep(tmp_path / "theirs", target(), tmp_path)
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / "ab").symlink_to(elsewhere)
    with pytest.raises(BadCompiled, match="leads out of its folder through a link"):
        unpack(file, target(), work)
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_and_a_folder_are_listed_and_not_waited_for(folder, command):
    folder.mkdir()
    os.mkfifo(folder / f"pipe{SUFFIX}")
    (folder / f"folder{SUFFIX}").mkdir()
    (folder / f"dangling{SUFFIX}").symlink_to(folder / "nowhere")
    code, out, _ = command("list")
    assert code == 0 and out.count("it is no file") == 2 and "dangling" in out
    assert command("import", folder / f"pipe{SUFFIX}")[0] == 2


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
