"""OneFlow's graph files, as far as OneDiff is told of them: OneFlow itself could not be had."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import oneflow_graphs
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.warm_up import Size, warm_up
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.profiles import identify
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Component, Precision


@pytest.fixture
def handle(model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineHandle:
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "1")
    folder = model_folder("2b")
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement(), "compiled": tmp_path}
    made = load(folder, family_of(folder), precision=Precision.BF16, backend="eager", **options)
    return replace(made, backend=BackendChoice("oneflow", "asked for"))


def folder_of(handle: PipelineHandle, *, wide: bool = False, dynamic: bool | None = None) -> Path:
    folder = folder_or_none(replace(handle, compile_options=CompileOptions(dynamic=dynamic)), wide=wide)
    assert folder is not None
    return folder


def folder_or_none(handle: PipelineHandle, *, wide: bool = False) -> Path | None:
    plan, how = handle.plan(Component.DENOISER), handle.compile_options
    weights = identify(handle.store.model, handle.family.denoiser, handle.loras, handle.architecture.name, plan.dtype)
    assert handle.compiled is not None
    return oneflow_graphs.graphs_folder(handle.compiled, weights, how, plan.accumulation, wide=wide)


def test_every_block_of_a_run_is_given_a_file(
    handle: PipelineHandle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onediff.infer_compiler.backends import registry

    files: list[Path] = []

    def oneflow(module: torch.nn.Module, *, options: Any) -> torch.nn.Module:
        files.append(Path(options.graph_file))
        return module

    monkeypatch.setitem(registry._BACKENDS, "oneflow", oneflow)
    with torch.inference_mode():
        warm_up(handle, [Size(64, 48, 9)])
    assert len(set(files)) == len(handle.store.module("transformer", "bf16").transformer_blocks)
    (folder,) = {file.parent for file in files}
    assert folder == folder_of(handle) and folder.is_dir() and folder.parent == tmp_path / "oneflow"


def test_what_changes_a_graph_changes_the_folder(handle: PipelineHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        folder_of(handle),
        folder_of(handle, wide=True),
        folder_of(handle, dynamic=False),
        folder_of(replace(handle, precision=Precision.FP16)),
    ]
    monkeypatch.setattr(oneflow_graphs, "version_of", lambda _package: "another")
    assert len({*folders, folder_of(handle)}) == 5


def test_folders_not_used_longest_go_beyond_the_limit(handle: PipelineHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    old, newer = folder_of(handle), folder_of(handle, wide=True)
    for second, folder in ((1000, old), (2000, newer)):
        (folder / "block-1.graph").write_bytes(bytes(600))
        os.utime(folder, (second, second))
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "0.000001")
    used = folder_of(handle, dynamic=False)
    assert [folder.is_dir() for folder in (used, newer, old)] == [True, True, False], (
        "a thousand bytes hold one of them"
    )


def test_where_nothing_is_kept_there_is_no_folder(
    handle: PipelineHandle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onediff.infer_compiler.backends import registry

    given: list[Path | None] = []

    def backend(module: torch.nn.Module, *, options: Any) -> torch.nn.Module:
        given.append(getattr(options, "graph_file", None))
        return module

    with torch.inference_mode():
        for other in (replace(handle, compiled=None), replace(handle, backend=BackendChoice("nexfort", ""))):
            monkeypatch.setitem(registry._BACKENDS, other.backend.name, backend)
            other.store.compiled.clear()
            warm_up(other, [Size(64, 48, 9)])
    assert given and set(given) == {None} and not (tmp_path / "oneflow").exists()
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "0")
    assert folder_or_none(handle) is None
    (tmp_path / "oneflow").write_text("a file", encoding="utf-8")
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "1")
    assert folder_or_none(handle) is None


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_folder_that_others_could_have_written_is_not_used(handle: PipelineHandle) -> None:
    folder = folder_of(handle)
    (folder / "graph").touch(0o666)
    (folder / "graph").chmod(0o666)
    assert folder_or_none(handle) == folder, "others cannot enter it"
    folder.chmod(0o755)
    assert folder_or_none(handle) is None
