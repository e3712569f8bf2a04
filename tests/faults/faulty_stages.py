"""The stages of a generation, each with its inputs prepared, so that it can be run, broken and run again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.hosts.core_nodes import SaveImage
from comfyui_onediff_guard.headless.server.follow import run_on_server
from comfyui_onediff_guard.pipelines.models.hub import fetch
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from generations import Generation
from hub_files import ID, files_of
from small_runs import opened


@dataclass
class ModelStage:
    """One method of a generation, after the methods before it, on a pipeline with nothing loaded."""

    folder: Path
    variant: str
    method: str  # of Generation; "load": only load the weights
    reads: str  # the component whose file the stage reads
    kept: Path  # folder of profiles
    precision: str = "fp16"
    torch: bool = True
    served: bool = False

    def __post_init__(self) -> None:
        self.folders = self.folder, self.kept
        self._before: Generation | None = None
        self.generation: Generation | None = None

    @property
    def file(self) -> Path:
        (file,) = (self.folder / self.reads).glob("*.safetensors")
        return file

    def fresh(self) -> None:
        self.generation = None
        stores._STORES.clear()
        if self._before is None and self.method in ("sample", "decode"):
            self._before = self._opened()
            self._before.encode()
            if self.method == "decode":
                self._before.sample()
        made = self._opened()
        if self._before is not None:
            self._before.handle = made.handle
            made.prompts, made.latents = self._before.prompts, self._before.latents
        self.generation = made

    def run(self) -> Any:
        assert self.generation is not None
        if self.method == "load":
            module = self.generation.handle.store.module(self.reads, self.precision)
            return {name: tensor.clone() for name, tensor in module.state_dict().items()}
        return getattr(self.generation, self.method)()

    def forget(self) -> None:
        """Delete what earlier runs learned: the fault of a first run does not repeat in a later one."""
        shutil.rmtree(self.kept, ignore_errors=True)

    def _opened(self) -> Generation:
        handle = opened(self.folder, "none", self.precision, profiles=self.kept)
        return Generation(replace(handle, policy=GuardPolicy(scope=Scope.LEARNED)), self.variant)


@dataclass
class FileStage:
    """A stage that writes files into a folder that is empty at first."""

    folder: Path
    run: Callable[[], Any]
    torch: bool = False
    served: bool = True

    def __post_init__(self) -> None:
        self.folders = (self.folder,)

    def fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


# `fresh`: state as after the start of a process. `run`: returns the result, compared bit by bit; may be called again
# after it raised. torch: torch operations count too. served: by a server in this process, whose threads and connections
# change during a run
Stage = ModelStage | FileStage


def saving(out: Path) -> FileStage:
    """An image written by a node."""
    images = torch.rand(1, 16, 24, 3, generator=torch.Generator().manual_seed(4))

    def run() -> list[bytes]:
        with host.plain_folders(models=[], input=out, output=out):
            shown = SaveImage().save(images, "a")["ui"]["images"]
        return [(out / picture["filename"]).read_bytes() for picture in shown]

    return FileStage(out, run, torch=True, served=False)


def download(cache: Path) -> FileStage:
    """A download from a hub on this machine."""
    return FileStage(cache, lambda: files_of(fetch(ID, None)))


def server_download(url: str, workflow: dict[str, Any], out: Path) -> FileStage:
    """The result of a run on a remote ComfyUI."""
    return FileStage(
        out, lambda: [file.read_bytes() for file in run_on_server(workflow, url=url, output_dir=out).files]
    )


def same(made: Any, expected: Any) -> bool:
    """Whether two results are bit-equal."""
    if isinstance(made, torch.Tensor):
        return made.dtype == expected.dtype and torch.equal(made, expected)
    if isinstance(made, dict):
        return made.keys() == expected.keys() and all(same(made[name], expected[name]) for name in made)
    if isinstance(made, (tuple, list)):
        return len(made) == len(expected) and all(map(same, made, expected))
    return made == expected
