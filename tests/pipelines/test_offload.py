"""Offload without an accelerator: which backends work with it, and which weights are loaded together. With one:
devices/on_it/."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.nodes.compile import Compile
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.offload import BlockOffload, Offload, Parts, backend_with
from comfyui_onediff_guard.pipelines.weights.placement import bytes_of
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.precision.shallow_copy import reporting
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from small_runs import SMALL, opened, sampled

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORKS = {
    "auto": {"oneflow", "nexfort", "inductor", "eager"},
    "none": {"oneflow", "nexfort", "inductor", "eager"},
    "model": {"nexfort", "inductor", "eager"},
    "group": {"inductor", "eager"},
    "sequential": {"eager"},
}


@pytest.mark.parametrize("offload", list(Offload))
@pytest.mark.parametrize("backend", sorted(WORKS["none"]))
def test_backend_chosen_by_name_works_or_is_refused_with_reason(only_backends, backend, offload):
    only_backends("oneflow", "nexfort", "inductor")
    choice = BackendChoice(backend, "as you chose")
    if backend in WORKS[offload.value]:
        assert backend_with(choice, offload, CUDA) == choice
        return
    with pytest.raises(BackendUnavailable) as refused:
        backend_with(choice, offload, CUDA)
    text = str(refused.value)
    assert text.startswith(f"{backend} does not work with offload '{offload.value}': ")
    named = text.split("Choose backend ")[1]
    assert all(f"'{other}'" in named for other in WORKS[offload.value] - {"nexfort"})
    kinds = [kind for kind in WORKS if backend in WORKS[kind]]
    assert named.endswith("offload '" + "', '".join(kinds) + "'.")


@pytest.mark.parametrize(
    ("backends", "offload", "found"),
    [
        (["oneflow", "inductor"], "group", "inductor"),
        (["oneflow"], "group", "eager"),
        (["nexfort", "inductor"], "group", "inductor"),
        (["nexfort", "inductor"], "model", "nexfort"),
        (["oneflow", "inductor"], "model", "inductor"),
        (["inductor"], "sequential", "eager"),
        (["oneflow", "inductor"], "none", "oneflow"),
    ],
)
def test_auto_takes_next_backend_that_works_and_gives_reason(only_backends, backends, offload, found):
    only_backends(*backends)
    first = compiling.choose_backend("auto", CUDA)
    assert first.name == backends[0]
    chosen = backend_with(first, Offload(offload), CUDA)
    assert chosen.name == found and chosen.automatic
    if found != first.name:
        assert f"auto: {first.name} does not work with offload '{offload}': " in chosen.reason


def test_no_backend_is_refused_on_cpu():
    choice = BackendChoice("inductor", "as you chose")
    assert backend_with(choice, Offload.SEQUENTIAL, CPU) is choice


def test_loader_and_compile_node_refuse_before_weights_are_read(only_backends, monkeypatch):
    only_backends("inductor")
    for module in (handles, offloading):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    with pytest.raises(BackendUnavailable, match="inductor does not work with offload 'sequential': a compiled block"):
        opened("2b", "sequential", "bf16", backend="inductor")
    handle = opened("2b", "sequential", "bf16", backend="auto")
    assert handle.backend.name == "eager" and "a compiled block cannot wait" in handle.backend.reason
    with pytest.raises(BackendUnavailable, match="Choose backend 'eager', or offload 'auto', 'none', 'model', 'group'"):
        Compile().apply(handle, "inductor", "auto", "default", False)
    (again,) = Compile().apply(handle, "auto", "auto", "default", False)
    assert again.backend.name == "eager"
    (again,) = Compile().apply(replace(handle, offload=Offload.GROUP), "inductor", "auto", "default", False)
    assert again.backend.name == "inductor"
    assert handle.store.loaded() == {}


# --- on a machine without an accelerator ------------------------------------------------------------------------------


def test_group_offload_acts_as_model_on_cpu_and_report_says_so():
    def run(offload: str):
        stores._STORES.clear()
        handle = opened("2b", offload, device=torch.device("cpu"))
        offloaded = []
        handle.store.placement.to_host = lambda name, _module: offloaded.append(name)
        latents, report = sampled(handle, SMALL)
        return latents, decode(handle, latents)[0], report, offloaded

    (right, frames, _, _), (latents, decoded, report, offloaded) = run("none"), run("group")
    assert torch.equal(latents, right) and torch.equal(decoded, frames)
    assert offloaded == ["text_encoder", "transformer", "vae"]
    assert "note: offload 'group' works like 'model' here: a CPU computes in main memory" in report.text()


def test_note_on_weights_is_given_once_by_all_ways_to_run(monkeypatch):
    stage = opened("2b").stage(Component.DENOISER)
    stage.handle.store.module("transformer", "fp32")
    stage.handle.store.notes["transformer"] = ("transformer: computed in fp32",)
    monkeypatch.setattr(stores, "brings_parts_to", lambda _device: True)
    ways = [kind.weights_at_once() for _, kind in stage.ways()]
    assert len(ways) == 3 and stage.report.notes.count("transformer: computed in fp32") == 1


def test_diffusers_sees_device_that_computes(model_folder):
    pipe: Any = CogVideoXPipeline.from_pretrained(model_folder("2b"))
    pipe.transformer = reporting(pipe.transformer, device=torch.device("cuda", 1))
    pipe.text_encoder = pipe.vae = None
    assert pipe._execution_device == torch.device("cuda", 1)
    assert reporting(pipe.transformer, dtype=torch.float32).device == torch.device("cuda", 1), "and in a copy of it"


# --- which weights are loaded together, and their bytes on the device: of modules without values ----------------------


def peak_on_device(component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> int:
    return Parts.of(component, offload, blocks).most_bytes(ahead=offload is Offload.GROUP)


def blocks(*widths: int) -> Any:
    module: Any = torch.nn.Module()
    module.embed = torch.nn.Linear(3, 1, bias=False)
    module.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(1, width)) for width in widths)
    module.register_buffer("scale", torch.ones(1))
    return module


@pytest.mark.parametrize(
    ("offload", "values"),
    [
        (Offload.GROUP, 3 + 1 + 2 * (5 + 2)),  # neighbours: not 5 + 4
        (Offload.SEQUENTIAL, 1 + 2 * 5),
    ],
)
def test_peak_of_weights_on_device_depends_on_offload(offload: Offload, values: int) -> None:
    with torch.device("meta"):
        module = blocks(1, 5, 2, 4)
    assert peak_on_device(module, offload, ("blocks",)) == peak_on_device(module, offload) == 4 * values


def test_blocks_that_share_weight_are_one_part_and_it_counts_once() -> None:
    with torch.device("meta"):
        module = blocks(2, 3, 4)
    module.blocks[2].append(module.blocks[0][0])
    parts = Parts.of(module, Offload.GROUP)
    assert parts.places == {"blocks.0": 0, "blocks.1": 1, "blocks.2": 0}
    assert parts.n_bytes == [4 * (4 + 8), 4 * 6]
    assert peak_on_device(module, Offload.GROUP) == bytes_of(module)


def test_peak_of_weights_of_published_cogvideox_5b() -> None:
    with torch.device("meta"):
        denoiser = CogVideoXTransformer3DModel(
            num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True
        )
    denoiser.to(torch.bfloat16)
    whole = bytes_of(denoiser)
    group = peak_on_device(denoiser, Offload.GROUP, COGVIDEOX.blocks)
    assert round(whole / 1e9, 1) == 11.1
    assert 2 / 42 < group / whole < 2.6 / 42
    assert peak_on_device(denoiser, Offload.SEQUENTIAL, COGVIDEOX.blocks) < 0.5 * group


def test_peak_of_block_offload_equals_estimate() -> None:
    """On a device without streams, where nothing is prefetched."""
    module = blocks(1, 5, 2, 4)
    sequential = BlockOffload(module, Offload.SEQUENTIAL, torch.device("cpu"))
    assert sequential.most_bytes == peak_on_device(module, Offload.SEQUENTIAL)
    group = BlockOffload(module, Offload.GROUP, torch.device("cpu"))
    assert group.most_bytes == Parts.of(module, Offload.GROUP).most_bytes(ahead=False)
