"""Soak test: generations of all families in turn, a third of them with reruns. Memory does not grow, and all reports
are right."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import process_state
import psutil
import pytest
import torch
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from generations import STEPS, Generation
from safetensors.torch import load_file, save_file
from small_runs import opened
from tiers import by_tier

ROUNDS = by_tier(56, 3)  # over all kinds: 1,008 or 54 generations
WARM_UP = by_tier(4, 2)  # rounds
SCOPES = Scope.LEARNED, Scope.STEP  # alternating
KEPT = 3  # generations still referenced, as ComfyUI references the last graphs


class Kind(NamedTuple):
    variant: str
    overflow: str = "none"  # argument of model_folder
    precision: str = "fp16"

    @property
    def reruns(self) -> bool:
        return self.overflow == "inside"


KINDS = (
    Kind("2b"),
    Kind("2b", "inside"),
    Kind("5b"),
    Kind("5b-i2v"),
    Kind("5b", "inside"),
    Kind("1.5"),
    Kind("1.5-i2v"),
    Kind("5b-i2v", "inside"),
    Kind("cogview3"),
    Kind("cogview4"),
    Kind("1.5-i2v", "inside"),
    Kind("svd"),
    Kind("svd-xt"),
    Kind("cogview3", "inside"),
    Kind("2b", precision="fp32"),
    Kind("cogview4", "stream"),  # computed in float32
    Kind("cogview4", "inside"),
    Kind("svd", precision="bf16"),
)


def generated(kind: Kind, folder: Path, seed: int, scope: Scope) -> Generation:
    handle = replace(opened(folder, "none", kind.precision), policy=GuardPolicy(scope))
    generation = Generation(handle, kind.variant, seed)
    generation.whole()
    return generation


def wrong_in(kind: Kind, generation: Generation) -> list[str]:
    """Wrong facts in its reports."""
    wrong = [] if torch.isfinite(generation.frames).all() else ["frames are not finite"]
    for stage, report in generation.reports.items():
        facts = report.as_dict()
        outcomes = [step.outcome for step in report.steps]
        calls = STEPS * report.calls_per_step if stage == "denoiser" else len(outcomes)
        reruns = 0
        if kind.reruns and stage == "denoiser":
            reruns = 1 if generation.handle.policy.scope is Scope.LEARNED else calls
        expected = ["rerun"] * reruns + ["finite"] * (calls - reruns)
        if outcomes != expected or not reruns == facts["reruns"] == facts["outcomes"].get("rerun", 0):
            wrong.append(f"{stage}: {outcomes}, {facts['reruns']} reruns counted")
    return wrong


@contextmanager
def unrecorded() -> Generator[None]:
    """Disable logging and warnings: pytest keeps them all, which would be the memory measured here."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def bytes_kept_of_a_tensor(folder: Path) -> float:
    """Bytes that safetensors leaks per tensor read, of any size: two objects of 32 bytes in 0.8.0."""
    file, tensors, times = folder / "small.safetensors", 100, 20
    save_file({str(name): torch.zeros(1) for name in range(tensors)}, file)
    load_file(file)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(times):
        load_file(file)
    gc.collect()
    return round((sys.getallocatedblocks() - before) / tensors / times) * 32


class Reading(NamedTuple):
    """Memory figures of the process while nothing runs."""

    memory: int  # resident bytes after free memory was returned
    tensors_read: int  # from files, since the process started
    tensors: int  # alive
    storages: int  # their bytes
    stores: int  # of loaded models
    caches: dict[str, int]  # lengths of all containers in the pack's modules

    @classmethod
    def taken(cls, tensors_read: int = 0) -> Reading:
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)
        kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # compilers' tensors have no storage
        tensors = [held for held in gc.get_objects() if type(held) in kinds]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        memory = psutil.Process().memory_info().rss
        alive = len(tensors), sum(storages.values()), len(stores._STORES)
        return cls(memory, tensors_read, *alive, lengths_of_caches())


def lengths_of_caches() -> dict[str, int]:
    modules = [*sys.modules.items()]
    return {
        f"{name}.{held}": length
        for name, module in modules
        if name.startswith("comfyui_onediff_guard.") and isinstance(module, ModuleType)
        for held, value in [*vars(module).items()]
        if (length := length_of(value)) is not None and not held.startswith("__")
    }


def length_of(value: Any) -> int | None:
    if hasattr(value, "cache_info"):
        return value.cache_info().currsize
    return len(value) if isinstance(value, Sized) and not isinstance(value, (type, str, bytes, torch.Tensor)) else None


def test_memory_does_not_grow_and_reports_are_correct(
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str, object], None],
) -> None:
    assert sum(kind.reruns for kind in KINDS) * 3 == len(KINDS)
    folders = {kind: model_folder(kind.variant, kind.overflow) for kind in KINDS}
    held: deque[Generation] = deque(maxlen=KEPT)
    readings, wrong, left, reruns, read = [], [], [], 0, 0
    load = stores.ComponentStore._load

    def counting(*arguments: Any) -> torch.nn.Module:
        nonlocal read
        module = load(*arguments)
        read += len(module.state_dict())
        return module

    monkeypatch.setattr(stores.ComponentStore, "_load", counting)
    before: process_state.State = {}
    with unrecorded():
        for turn in range(ROUNDS):
            for kind, folder in folders.items():
                made = generated(kind, folder, turn, SCOPES[turn % 2])
                wrong += [f"{turn} {kind}: {line}" for line in wrong_in(kind, made)]
                reruns += made.reports["denoiser"].reruns
                held.append(made)
                del made
            held.clear()
            if turn == WARM_UP - 1:
                before = process_state.read()
            if turn >= WARM_UP - 1:
                readings.append(Reading.taken(read))
                left += process_state.changes(before)
    first, last = readings[0], readings[-1]
    lost = bytes_kept_of_a_tensor(tmp_path)
    grown = [r.memory - first.memory - lost * (r.tensors_read - first.tensors_read) for r in readings]
    spread = max(map(abs, grown)) / first.memory
    safetensors = lost * (last.tensors_read - first.tensors_read)
    figure("Soak: generations in turn, a third of them with reruns", ROUNDS * len(KINDS))
    figure("Soak: denoiser calls recomputed", reruns)
    figure("Soak: wrong reports", len(wrong))
    figure("Soak: memory after the warm-up, and its largest change", f"{first.memory >> 20} MiB, {spread:.2%}")
    figure(
        "Soak: memory leaked by safetensors, not counted",
        f"{safetensors / 2**20:.1f} MiB",
    )
    assert wrong == [] and left == []
    for reading in readings[1:]:
        assert reading[2:] == first[2:], "tensors, storages, stores, caches"
    assert first.stores == 0
    assert spread < 0.02
