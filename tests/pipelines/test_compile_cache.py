"""The folders where inductor keeps compiled code. Nothing that is wrong with them fails a run."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import cache as compile_cache
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.cache import (
    IMPORTED,
    INDUCTOR,
    SAVED,
    SUFFIX,
    TRITON,
    exportable,
    keep_imported,
)
from comfyui_onediff_guard.pipelines.compile.compiled_blocks import while_compiling
from comfyui_onediff_guard.precision import machine
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE
from small_runs import opened
from torch._dynamo.utils import counters


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "2")
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    handle = opened("2b", compiled=tmp_path / "compiled")
    return replace(handle, backend=BackendChoice("inductor", "as you chose"))


@pytest.mark.parametrize(
    ("component", "changed", "differs"),
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
def test_cache_key_depends_only_on_what_changes_compiled_code(pipeline, component, changed, differs):
    model = pipeline.store.model
    configs = {name: {**getattr(model, name), **changed.get(name, {})} for name in ("denoiser_config", "vae_config")}

    def name(model, **changed):
        plan = pipeline.plan(changed.get("component", component))
        plan = replace(plan, dtype=changed.get("dtype", plan.dtype))
        options = CompileOptions(channels_last=changed.get("channels_last", False))
        card = ARCHITECTURES[changed.get("architecture", "cpu")]
        store = SimpleNamespace(model=model, placement=pipeline.store.placement)
        return compile_cache.target_of(SimpleNamespace(store=store, architecture=card), plan, options).name

    assert (name(model) != name(replace(model, **configs), **changed)) is differs


@pytest.mark.parametrize("field", ["flags", "Features"])  # of x86, of ARM
def test_cpu_is_identified_by_name_and_instruction_sets(monkeypatch, field):
    found = []
    for sets in ("fp asimd", "asimd fp", "fp asimd sve"):
        text = f"model name : A CPU\n{field} : {sets}\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        found.append(machine._cpu())
    assert found[0] == found[1] != found[2] and all(name.startswith("A CPU, ") for name in found)


def run(handle, graphs=1, error=None):
    """A run in which inductor compiles. Returns its report, its two folders, and the files that were there before."""
    report = handle.report(handle.plan(Component.DENOISER))
    with while_compiling(handle, report, lambda _: None):
        folder = Path(os.environ.get(INDUCTOR, "nowhere"))
        found = {path.name for path in folder.rglob("*") if path.is_file()}
        if folder.is_dir():
            (folder / "kernel").write_text("code" * 1000)
        counters["stats"]["unique_graphs"] += graphs
        result = report, folder, os.environ.get(TRITON), found
        if error:
            raise error
    return result


def target(handle):
    plan = handle.plan(Component.DENOISER)
    return compile_cache.target_of(handle, plan, handle.compile_options)


def lines(handle, report):
    return [*report.notes[len(handle.store.model.notes) :]]


def test_each_target_keeps_its_folder_and_variables_are_restored(pipeline):
    other = replace(pipeline, compile_options=CompileOptions(dynamic=True))
    report, folder, triton, found = run(pipeline)
    assert folder == pipeline.compiled / f"{target(pipeline).name}{SUFFIX}" and triton == f"{folder}/triton"
    assert found == set() and lines(pipeline, report) == [] and folder.stat().st_mode & 0o077 == 0
    assert run(other)[3] == set() and run(pipeline)[3] == {"kernel", SAVED}
    assert INDUCTOR not in os.environ and TRITON not in os.environ
    assert exportable(folder) == (target(pipeline), b"artifacts")


@pytest.mark.parametrize("error", [None, RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_run_that_compiled_saves_artifacts_even_after_error(pipeline, error):
    run(pipeline, graphs=0)
    file = pipeline.compiled / f"{target(pipeline).name}{SUFFIX}" / SAVED
    assert not file.exists()
    with pytest.raises(type(error)) if error else nullcontext():
        run(pipeline, error=error)
    assert file.exists() and INDUCTOR not in os.environ


@pytest.mark.parametrize("defect", ["", "damaged", "another target", "not PyTorch's", "another version's"])
def test_imported_artifacts_are_loaded_by_next_run_or_discarded(pipeline, monkeypatch, defect):
    loaded = []

    def load(artifacts):
        if defect == "not PyTorch's":
            raise KeyError("inductor")
        loaded.append((artifacts, os.environ[INDUCTOR]))
        return None if defect == "another version's" else "info"

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    keep_imported(pipeline.compiled, target(pipeline), b"theirs")
    folder = pipeline.compiled / f"{target(pipeline).name}{SUFFIX}"
    file = folder / IMPORTED
    if defect == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    if defect == "another target":
        file.write_bytes(file.read_bytes().replace(b"CogVideoX-2B", b"CogVideoX-5B"))
    report = run(pipeline, graphs=0)[0]
    assert not file.exists() and (folder / SAVED).exists() is (not defect)
    if defect:
        (line,) = lines(pipeline, report)
        assert line.startswith("imported compiled code was discarded: ")
        return
    run(pipeline, graphs=0)
    assert loaded == [(b"theirs", str(folder))] and exportable(folder) == (target(pipeline), b"theirs")


def test_variables_set_by_user_are_respected_and_noted(pipeline, monkeypatch, tmp_path):
    monkeypatch.setenv(TRITON, str(tmp_path / "triton"))
    assert run(pipeline)[2] == str(tmp_path / "triton")
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "users"))
    other = replace(pipeline, compiled=tmp_path / "unused")
    report, folder, *_ = run(other)
    assert folder == tmp_path / "users" and f"{INDUCTOR}={folder}" in report.notes[-1] and not other.compiled.exists()


def test_variables_set_by_torch_itself_are_restored(pipeline, monkeypatch):
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    own = default_cache_dir(), f"{default_cache_dir()}/triton/0"
    monkeypatch.setenv(INDUCTOR, own[0])
    monkeypatch.setenv(TRITON, own[1])
    report, folder, triton, _ = run(pipeline)
    assert folder.parent == pipeline.compiled and triton == f"{folder}/triton" and lines(pipeline, report) == []
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == own


@pytest.mark.parametrize("harm", ["is another user's", 0o666, 0o620])  # others can write, its group can
@pytest.mark.parametrize("folder_kind", ["kept", "exported", "exported for Triton", "the default"])
def test_folder_that_other_users_can_write_to_is_not_used(pipeline, monkeypatch, tmp_path, harm, folder_kind):
    """One file in the pack's own folder, in an exported one, or in inductor's default one if nothing is kept."""
    shared = run(pipeline)[1] if folder_kind == "kept" else tmp_path / "shared"
    (shared / "ab").mkdir(parents=True)
    shared.chmod(0o755)
    (shared / "ab" / "kernel.so").write_text("code")
    if folder_kind == "the default":
        monkeypatch.setattr("torch._inductor.runtime.runtime_utils.default_cache_dir", lambda: str(shared))
        monkeypatch.setenv(LIMIT_VARIABLE, "0")
    elif folder_kind != "kept":
        monkeypatch.setenv(INDUCTOR if folder_kind == "exported" else TRITON, str(shared))
    before = {variable: os.environ.get(variable) for variable in (INDUCTOR, TRITON)}
    if isinstance(harm, int):
        (shared / "ab" / "kernel.so").chmod(harm)
    elif os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can give files away")
    else:
        os.chown(shared / "ab" / "kernel.so", 65534, 65534)
    report, folder, triton, found = run(pipeline)
    assert found == set() and str(shared) not in (str(folder), triton) and not folder.exists()
    assert "another user" in report.notes[-1]
    assert {variable: os.environ.get(variable) for variable in (INDUCTOR, TRITON)} == before


def test_unusable_folder_or_full_disk_only_adds_note(pipeline, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "write", Mock(side_effect=OSError(28, "No space left on device")))
        report = run(pipeline)[0]
        assert "No space left on device" in lines(pipeline, report)[0]
    in_the_way = pipeline.compiled.with_name("file")
    in_the_way.write_text("in the way")
    report = run(replace(pipeline, compiled=in_the_way))[0]
    assert lines(pipeline, report)[0].startswith(f"compiled code cannot be kept in {in_the_way}: ")


@pytest.mark.parametrize("without", ["backend", "folder", "limit"])
def test_disabled_cache_creates_no_folder_and_sets_no_variable(pipeline, monkeypatch, without):
    changed = {"backend": {"backend": BackendChoice("eager", "as you chose")}, "folder": {"compiled": None}}
    if without == "limit":
        monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert run(replace(pipeline, **changed.get(without, {})))[1:3] == (Path("nowhere"), None)
    assert not pipeline.compiled.exists()


def test_oldest_folder_is_deleted_but_never_one_in_use(pipeline, monkeypatch):
    def used(dynamic, seconds_ago):
        folder = run(replace(pipeline, compile_options=CompileOptions(dynamic=dynamic)))[1]
        os.utime(folder, times=(time.time() - seconds_ago,) * 2)
        return folder

    monkeypatch.setenv(LIMIT_VARIABLE, "0.00001")  # 10 kB: two of them
    oldest, older = used(None, 300), used(True, 200)
    run(pipeline, graphs=0)  # used, and so no longer the oldest
    latest = used(False, 0)
    assert {*pipeline.compiled.iterdir()} == {oldest, latest} and not older.exists()
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000000001")
    run(pipeline)
    assert [*pipeline.compiled.iterdir()] == [oldest], "in use"
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    assert f"{LIMIT_VARIABLE} is not used" in run(pipeline)[0].notes[-1]


@pytest.mark.parametrize(
    ("graphs", "from_cache", "text"),
    [
        (2, 0, "2 graphs newly compiled"),
        (3, 2, "3 graphs, 2 of them from the cache of earlier runs"),
        (2, 2, "2 graphs, from the cache of earlier runs"),
        (0, 0, "0 graphs newly compiled"),
    ],
)
def test_report_counts_compiled_graphs_and_graphs_from_cache(pipeline, graphs, from_cache, text):
    report = pipeline.report(pipeline.plan(Component.DENOISER))
    report.graphs, report.graphs_kept = graphs, from_cache
    assert f"backend: inductor (as you chose), {text}\n" in report.text()
    assert (report.as_dict()["graphs"], report.as_dict()["graphs_kept"]) == (graphs, from_cache)
