"""What a compiler wrote is there for the next run, and nothing that is wrong with it fails one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from archives import rewrite
from comfyui_onediff_guard.pipelines.compile import cache as compile_cache
from comfyui_onediff_guard.pipelines.compile import target as targets
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR, TRITON
from comfyui_onediff_guard.pipelines.compile.code import SUFFIX, unpack
from comfyui_onediff_guard.pipelines.run.sample import while_compiling
from comfyui_onediff_guard.precision import machine
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE


@pytest.fixture
def pipeline(model_folder, open_pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "2")
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    handle = open_pipeline(model_folder("2b"))
    return replace(handle, backend=BackendChoice("inductor", "asked for"), compiled=tmp_path / "compiled")


def target(handle, report):
    model, options, device = handle.store.model, handle.compile_options, handle.store.placement.device
    return targets.target_of(model, report.plan, options, device, handle.architecture)


@pytest.mark.parametrize(
    ("component", "changed", "other_code"),
    [
        (Component.DENOISER, {}, False),
        (Component.DENOISER, {"denoiser_config": {"num_layers": 9}}, True),
        (Component.DENOISER, {"denoiser_config": {"_name_or_path": "elsewhere"}}, False),
        (Component.DENOISER, {"vae_config": {"latent_channels": 9}}, False),
        (Component.VAE_DECODE, {"vae_config": {"latent_channels": 9}}, True),
        (Component.VAE_DECODE, {"denoiser_config": {"num_layers": 9}}, False),
        (Component.DENOISER, {"component": Component.VAE_DECODE}, True),
        (Component.DENOISER, {"dtype": "bf16"}, True),
        (Component.DENOISER, {"channels_last": True}, True),
        (Component.DENOISER, {"architecture": "sm90"}, True),
    ],
    ids=str,
)
def test_compiled_code_is_found_again_for_what_it_hangs_on_alone(pipeline, component, changed, other_code):
    model, device = pipeline.store.model, pipeline.store.placement.device
    configs = {name: {**getattr(model, name), **changed.get(name, {})} for name in ("denoiser_config", "vae_config")}

    def name(model, **changed):
        plan = pipeline.plan(changed.get("component", component))
        plan = replace(plan, dtype=changed.get("dtype", plan.dtype))
        options = CompileOptions(channels_last=changed.get("channels_last", False))
        card = ARCHITECTURES[changed.get("architecture", "cpu")]
        return targets.target_of(model, plan, options, device, card).name

    assert (name(model) != name(replace(model, **configs), **changed)) is other_code


def held(handle, report):
    return while_compiling(handle, report, lambda _: None)


def in_new_process():
    compile_cache._works.clear()


def written(handle, **files):
    """The report of a run in which a compiler writes these files, and what it found there before."""
    report = handle.report(handle.plan(Component.DENOISER))
    found = {}
    with held(handle, report):
        folder = Path(os.environ[INDUCTOR])
        found.update({path.name: path.read_text() for path in folder.rglob("*") if path.is_file()})
        for name, text in files.items():
            (folder / "ab").mkdir(exist_ok=True)
            (folder / "ab" / name).write_text(text)
    return report, found


def only_file(handle):
    (file,) = handle.compiled.iterdir()
    return file


@pytest.mark.parametrize("said", ["flags", "Features"])  # of x86, of ARM
def test_a_cpu_is_told_by_its_instructions(monkeypatch, said):
    found = []
    for sets in ("fp asimd", "asimd fp", "fp asimd sve"):
        text = f"model name : A CPU\n{said} : {sets}\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        found.append(machine._cpu())
    assert found[0] == found[1] != found[2] and all(name.startswith("A CPU, ") for name in found)


def test_what_is_written_is_there_in_the_next_process_and_nowhere_else(pipeline):
    report, found = written(pipeline, kernel="code")
    assert found == {} and report.notes == pipeline.store.model.notes
    assert INDUCTOR not in os.environ and TRITON not in os.environ
    assert only_file(pipeline).name == f"{target(pipeline, report).name}{SUFFIX}"
    in_new_process()
    assert written(pipeline)[1] == {"kernel": "code"}


def moved(pipeline, folder):
    """The file that is kept, as it comes from another machine: its name and bytes. It is gone from here."""
    file = only_file(pipeline)
    data = file.read_bytes()
    shutil.rmtree(folder)
    return file.name, data


def test_what_another_machine_compiled_is_there(pipeline):
    written(pipeline, kernel="code")
    name, data = moved(pipeline, pipeline.compiled)
    in_new_process()
    compile_cache.take_in(pipeline.compiled, name, data)
    assert written(pipeline)[1] == {"kernel": "code"}


def test_what_it_compiled_is_put_beside_what_is_here(pipeline):
    """In the file, and in the folder of a process that compiles for the same target already."""
    written(pipeline, there="code")
    name, data = moved(pipeline, pipeline.compiled)
    in_new_process()
    written(pipeline, here="other code")
    compile_cache.take_in(pipeline.compiled, name, data)
    assert written(pipeline)[1] == {"here": "other code", "there": "code"}
    in_new_process()
    assert written(pipeline)[1] == {"here": "other code", "there": "code"}


@pytest.mark.parametrize("damage", ["cut short", "a bit", "another name", "nothing"])
def test_what_came_damaged_is_left_alone(pipeline, caplog, damage):
    written(pipeline, kernel="code")
    name, data = moved(pipeline, pipeline.compiled)
    middle = len(data) // 2
    came = {
        "cut short": (name, data[:middle]),
        "a bit": (name, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]),
        "another name": (f"../{name}", data),
        "nothing": (name, b""),
    }
    compile_cache.take_in(pipeline.compiled, *came[damage])
    assert "compiled code from another machine is not used" in caplog.text
    assert not pipeline.compiled.exists() or not [*pipeline.compiled.iterdir()]
    in_new_process()
    assert written(pipeline)[1] == {}


@pytest.mark.parametrize("what", ["torch", "device", "python", "dtype", "accumulation", "options", "config"])
def test_for_something_else_nothing_is_there(pipeline, monkeypatch, what):
    written(pipeline, kernel="code")
    here = targets.platform_of(pipeline.store.placement.device, pipeline.architecture.name)
    changed = {
        "dtype": {"precision": Precision.BF16},
        "options": {"compile_options": CompileOptions(dynamic=True)},
    }
    other = replace(pipeline, **changed.get(what, {}))
    if what in ("torch", "device", "python"):
        monkeypatch.setattr(targets, "platform_of", lambda *_: replace(here, **{what: "another"}))
    if what == "accumulation":
        plan = replace(other.plan(Component.DENOISER), accumulation="on")
        monkeypatch.setattr(type(other), "plan", lambda *_: plan)
    if what == "config":
        config = {**other.store.model.denoiser_config, "num_layers": 7}
        monkeypatch.setattr(other.store, "model", replace(other.store.model, denoiser_config=config))
    in_new_process()
    assert written(other, another="code")[1] == {}
    assert len(list(pipeline.compiled.iterdir())) == 2


def test_a_process_that_ran_another_model_keeps_each_ones_own(pipeline):
    other = replace(pipeline, compile_options=CompileOptions(dynamic=True))
    written(pipeline, kernel="code")
    assert written(other, another="code")[1] == {}
    assert written(pipeline)[1] == {"kernel": "code"}


def test_two_processes_at_once_keep_what_both_compiled(pipeline):
    written(pipeline)
    mine = dict(compile_cache._works)
    in_new_process()
    written(pipeline, theirs="code")
    compile_cache._works.clear()
    compile_cache._works.update(mine)
    written(pipeline, mine="code")
    in_new_process()
    assert written(pipeline)[1] == {"mine": "code", "theirs": "code"}


def garbage(file):
    file.write_bytes(b"no archive at all")


def half(file):
    file.write_bytes(file.read_bytes()[:100])


def empty(file):
    file.write_bytes(b"")


def for_something_else(file):
    changed(file, "manifest.json", lambda content: content.replace(b'"CogVideoX-2B"', b'"CogVideoX-5B"'))


def half_a_manifest(file):
    changed(file, "manifest.json", lambda content: content[:40])


def another_byte(file):
    changed(file, "ab/kernel", lambda content: b"codf")


def changed(file, name, change):
    rewrite(file, lambda contents: {**contents, name: change(contents[name])})


def of_another_user(file):
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(file, 65534, 65534)


def others_can_write(file):
    file.chmod(0o666)


def its_group_can_write(file):
    file.chmod(0o620)


def a_folder(file):
    file.unlink()
    (file / "inside").mkdir(parents=True)


OTHERS = [of_another_user, others_can_write, its_group_can_write]
DAMAGES = [garbage, half, empty, half_a_manifest, another_byte, for_something_else, a_folder, *OTHERS]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_thrown_away_with_a_line(pipeline, damage, caplog):
    written(pipeline, kernel="code")
    damage(only_file(pipeline))
    in_new_process()
    report, found = written(pipeline, kernel="code")
    (line,) = report.notes[len(pipeline.store.model.notes) :]
    assert found == {} and line.startswith("the compile cache is thrown away") and line in caplog.messages
    in_new_process()
    assert written(pipeline)[1] == {"kernel": "code"}, "kept again"


@pytest.mark.parametrize(
    ("graphs", "from_cache", "says"),
    [
        (2, 0, "2 graphs compiled anew"),
        (3, 2, "3 graphs, 2 of them from the cache of earlier runs"),
        (2, 2, "2 graphs, from the cache of earlier runs"),
        (0, 0, "0 graphs compiled anew"),
    ],
)
def test_the_report_tells_what_was_compiled_from_what_was_kept(pipeline, graphs, from_cache, says):
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    report.graphs, report.graphs_kept = graphs, from_cache
    assert f"backend: inductor (asked for), {says}\n" in report.text()
    assert (report.as_dict()["graphs"], report.as_dict()["graphs_kept"]) == (graphs, from_cache)


def test_every_damage_to_a_byte_is_noticed_or_does_no_harm(pipeline, tmp_path):
    report, _ = written(pipeline, kernel="code" * 50, another="more" * 50)
    file, wanted = only_file(pipeline), target(pipeline, report)
    whole = file.read_bytes()
    noticed = 0
    for place in range(0, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        folder = tmp_path / f"unpacked{place}"
        folder.mkdir()
        try:
            unpack(file, wanted, folder)
        except (compile_cache.BadCompiled, OSError):
            noticed += 1
        texts = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert set(texts.items()) <= {("kernel", "code" * 50), ("another", "more" * 50)}, place
    assert noticed > len(whole) // 3 // 2


def test_a_folder_that_is_a_file_costs_a_line(pipeline):
    pipeline.compiled.write_text("in the way")
    report, _ = written(pipeline, kernel="code")
    assert [note for note in report.notes if note.startswith("compiled code could not be kept in ")]
    assert pipeline.compiled.read_text() == "in the way"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_folder_that_cannot_be_written_costs_a_line(pipeline):
    report, _ = written(replace(pipeline, compiled=Path("/proc/compiled")), kernel="code")
    assert [note for note in report.notes if note.startswith("compiled code could not be kept in /proc/compiled")]


def test_a_full_disk_costs_a_line_and_leaves_nothing(pipeline, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    report, _ = written(pipeline, kernel="code")
    assert "No space left on device" in report.notes[-1] and list(pipeline.compiled.iterdir()) == []


def no_disk(**_):
    raise OSError("no usable temporary directory")


def no_inductor():
    raise ImportError("no module named torch._inductor")


@pytest.mark.parametrize(
    ("broken", "by", "says"),
    [
        ("tempfile.TemporaryDirectory", no_disk, "compiled code is not kept: OSError: no usable temporary directory"),
        ("_forget_loaded", no_inductor, "compiled code is not kept: ImportError: no module named torch._inductor"),
    ],
)
def test_where_it_cannot_begin_the_run_goes_on(pipeline, monkeypatch, broken, by, says):
    monkeypatch.setattr(f"{compile_cache.__name__}.{broken}", by)
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    with held(pipeline, report):
        assert INDUCTOR not in os.environ
    assert report.notes[-1] == says and not pipeline.compiled.exists()


def test_what_the_user_exported_is_respected_and_told(pipeline, monkeypatch, tmp_path):
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "users"))
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    with held(pipeline, report):
        assert os.environ[INDUCTOR] == str(tmp_path / "users")
    assert f"{INDUCTOR}={tmp_path / 'users'}" in report.notes[-1] and not pipeline.compiled.exists()


@pytest.mark.parametrize("harm", OTHERS)
@pytest.mark.parametrize("taken", ["exported", "exported for Triton", "the default"])
def test_where_another_user_could_have_put_code_nothing_is_loaded(pipeline, monkeypatch, tmp_path, harm, taken):
    """Deep in a folder that was exported, or that inductor takes by itself where nothing is kept."""
    shared = tmp_path / "shared"
    (shared / "ab").mkdir(parents=True)
    (shared / "ab" / "kernel.so").write_text("code")
    if taken == "the default":
        monkeypatch.setattr("torch._inductor.runtime.runtime_utils.default_cache_dir", lambda: str(shared))
        monkeypatch.setenv(LIMIT_VARIABLE, "0")
    else:
        monkeypatch.setenv(INDUCTOR if taken == "exported" else TRITON, str(shared))
    before = {variable: os.environ.get(variable) for variable in (INDUCTOR, TRITON)}
    harm(shared / "ab" / "kernel.so")
    with held(pipeline, report := pipeline.report(pipeline.plan(Component.DENOISER))):
        assert str(shared) not in (os.environ[INDUCTOR], os.environ[TRITON])
        assert Path(os.environ[INDUCTOR]).stat().st_mode & 0o077 == 0
    assert taken == "exported for Triton" or "another user" in report.notes[-1]
    assert {variable: os.environ.get(variable) for variable in (INDUCTOR, TRITON)} == before


def test_a_folder_of_tritons_that_the_user_exported_stays(pipeline, monkeypatch, tmp_path):
    monkeypatch.setenv(TRITON, str(tmp_path / "users"))
    with held(pipeline, pipeline.report(pipeline.plan(Component.DENOISER))):
        assert os.environ[TRITON] == str(tmp_path / "users") and INDUCTOR in os.environ
    assert os.environ[TRITON] == str(tmp_path / "users")


def test_what_torch_exported_itself_is_put_back(pipeline, monkeypatch):
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    monkeypatch.setenv(INDUCTOR, default_cache_dir())
    monkeypatch.setenv(TRITON, f"{default_cache_dir()}/triton/0")
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    with held(pipeline, report):
        assert os.environ[TRITON] == f"{os.environ[INDUCTOR]}/triton"
        assert not os.environ[INDUCTOR].startswith(default_cache_dir())
    assert report.notes == pipeline.store.model.notes
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (default_cache_dir(), f"{default_cache_dir()}/triton/0")


def test_a_run_that_was_interrupted_keeps_what_it_compiled_and_a_failed_compiler_does_not(pipeline):
    from torch._dynamo.exc import InternalTorchDynamoError

    class Interrupted(Exception):
        pass

    def compile_and_raise(report, error):
        with held(pipeline, report):
            (Path(os.environ[INDUCTOR]) / type(error).__name__).write_text("code")
            raise error

    def ended_by(error):
        report = pipeline.report(pipeline.plan(Component.DENOISER))
        with pytest.raises(type(error)):
            compile_and_raise(report, error)
        assert INDUCTOR not in os.environ
        return report

    ended_by(KeyboardInterrupt())
    assert not pipeline.compiled.exists(), "the compiler may have been ended with it"
    in_new_process()
    ended_by(Interrupted())
    assert only_file(pipeline)
    report = ended_by(InternalTorchDynamoError("cannot be compiled"))
    assert "compiling failed" in report.notes[-1] and list(pipeline.compiled.iterdir()) == []
    assert written(pipeline)[1] == {}


@pytest.mark.parametrize("without", ["backend", "folder", "limit"])
def test_where_nothing_is_kept_nothing_is_touched(pipeline, monkeypatch, without):
    changed = {"backend": {"backend": BackendChoice("eager", "asked for")}, "folder": {"compiled": None}}
    if without == "limit":
        monkeypatch.setenv(LIMIT_VARIABLE, "0")
    handle = replace(pipeline, **changed.get(without, {}))
    with held(handle, handle.report(handle.plan(Component.DENOISER))):
        assert INDUCTOR not in os.environ
    assert not pipeline.compiled.exists() and not compile_cache._works.keys() & {pipeline.compiled}


def test_the_oldest_is_dropped_and_never_what_is_in_use(pipeline, monkeypatch):
    def used(dynamic, seconds_ago):
        handle = replace(pipeline, compile_options=CompileOptions(dynamic=dynamic))
        report, _ = written(handle, **{f"kernel{dynamic}": os.urandom(3000).hex()})
        file = pipeline.compiled / f"{target(handle, report).name}{SUFFIX}"
        os.utime(file, times=(time.time() - seconds_ago,) * 2)
        return file

    monkeypatch.setenv(LIMIT_VARIABLE, "0.00001")  # 10 kB: two of them
    oldest, older = used(None, 300), used(True, 200)
    in_new_process()
    written(replace(pipeline, compile_options=CompileOptions()))  # used, and so no longer the oldest
    latest = used(False, 0)
    assert sorted(pipeline.compiled.iterdir()) == sorted([oldest, latest]) and not older.exists()
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000000001")
    written(pipeline, more="code")
    assert list(pipeline.compiled.iterdir()) == [oldest], "in use"


def test_what_a_killed_process_left_is_deleted_a_day_later(pipeline, monkeypatch, tmp_path):
    def left(name, days):
        folder = tmp_path / f"onediff_guard_{name}"
        (folder / "ab").mkdir(parents=True)
        os.utime(folder, times=(time.time() - days * 24 * 3600,) * 2)
        return folder

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, of_older_versions = left(f"{dead.pid}_a", 1.1), left("a", 1.1)
    fresh, in_use = left(f"{dead.pid}_b", 0.9), left(f"{os.getpid()}_c", 9)
    written(pipeline, kernel="code")
    assert fresh.exists() and in_use.exists() and not old.exists() and not of_older_versions.exists()


def test_a_limit_that_is_no_number_is_told_and_not_used(pipeline, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    report, _ = written(pipeline, kernel="code")
    assert f"{LIMIT_VARIABLE} is not used" in report.notes[-1] and only_file(pipeline)


def test_tritons_paths_are_those_of_the_folder_they_are_in(pipeline):
    """Its group files name their members by their whole path; without that it would compile again."""
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    for process in range(2):
        in_new_process()
        with held(pipeline, report):
            folder = Path(os.environ[TRITON])
            assert folder == Path(os.environ[INDUCTOR]) / "triton"
            group = folder / "HASH" / "__grp__kernel.json"
            if process == 0:
                group.parent.mkdir(parents=True)
                group.write_text(json.dumps({"child_paths": {"k.cubin": str(folder / "HASH" / "k.cubin")}}))
            assert json.loads(group.read_text()) == {"child_paths": {"k.cubin": str(folder / "HASH" / "k.cubin")}}


@pytest.mark.parametrize("gone", ["folder", "files"])
def test_a_temporary_folder_that_was_cleaned_costs_nothing_that_is_kept(pipeline, gone):
    """As systemd does with what nobody touched for ten days, while ComfyUI runs."""
    written(pipeline, kernel="code")
    folder = compile_cache._works[only_file(pipeline)].folder
    if gone == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "ab" / "kernel").unlink()
    report, _ = written(pipeline)
    assert report.notes == pipeline.store.model.notes
    written(pipeline, another="code")
    in_new_process()
    assert written(pipeline)[1] == {"kernel": "code", "another": "code"}
