"""Weights under ComfyUI's memory manager: which stay in memory and which are freed between runs of a graph."""

from __future__ import annotations

import gc

import pytest
import torch
from as_comfyui import GRAPHS
from comfyui_onediff_guard.comfyui_host import placement as comfy_placement
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.components import ComponentStore

GRAPH = GRAPHS["2b"]


def weights_in_memory():
    """Bytes of all parameters alive in this process."""
    gc.collect()
    parameters = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Parameter) and not o.is_meta]
    return sum({p.data_ptr(): p.nbytes for p in parameters}.values())


class Graph:
    """Load → Encode → Sample → Decode. As in ComfyUI, outputs are kept until the next run."""

    def __init__(self, model, offload="none"):
        self.model = model
        self.offload = offload
        self.outputs = {}

    def run(self, precision, sampler="inherit"):
        self.outputs.clear()
        pipeline = self.outputs["load"] = GRAPH.load(self.model, precision=precision, offload=self.offload)
        self.outputs["encode"] = GRAPH.encode(pipeline)["result"]
        self.outputs["sample"] = GRAPH.sample(pipeline, self.outputs["encode"], steps=1, precision=sampler)["result"]
        GRAPH.decode(pipeline, self.outputs["sample"][0])


@pytest.fixture
def graph(comfyui, model_folder):
    return Graph(model_folder("2b"))


@pytest.fixture
def loads(monkeypatch):
    """For each component that is read: its name, and the bytes of all weights in memory right after it."""
    seen = []
    original = ComponentStore._load

    def load(store, name, dtype):
        module = original(store, name, dtype)
        seen.append((name, weights_in_memory()))
        return module

    monkeypatch.setattr(ComponentStore, "_load", load)
    return seen


def names(loads):
    return [name for name, _ in loads]


def test_memory_manager_lists_loaded_components_and_drops_offloaded_ones(comfyui, model_folder):
    pipeline = GRAPH.load(model_folder("2b"), precision="fp32")

    def loaded():
        return [m.model.component for m in comfyui.management.current_loaded_models if m.model and m.model.model_size()]

    GRAPH.encode(pipeline)
    assert loaded() == [], "the text encoder is offloaded after encoding"
    denoiser = pipeline.store.module("transformer", "fp32")
    assert loaded() == [denoiser]
    size = comfyui.management.current_loaded_models[0].model.model_size()
    assert size == sum(p.nbytes for p in (*denoiser.parameters(), *denoiser.buffers()))
    pipeline.store.offload_to_cpu("transformer")
    assert loaded() == []
    assert pipeline.store.module("transformer", "fp32") is denoiser, "moved, not read again"


def test_only_components_whose_dtype_changes_are_read(graph, loads):
    graph.run("auto")  # fp32 on a CPU, for a model trained in fp16
    graph.run("fp32")
    assert names(loads) == ["text_encoder", "transformer", "vae"]
    del loads[:]
    graph.run("fp32", sampler="bf16")
    assert names(loads) == ["transformer"]


def test_switching_precision_never_keeps_two_copies_of_weights(graph, loads):
    before = weights_in_memory()
    graph.run("fp32")
    whole = weights_in_memory() - before
    largest = max(whole, *(n - before for _, n in loads))
    for precision, expected_reads in (
        ("bf16", ["text_encoder", "transformer", "vae"]),
        ("fp16", ["text_encoder", "transformer", "vae"]),
        ("fp32", ["transformer", "vae"]),  # its prompt is cached
    ):
        del loads[:]
        graph.run(precision)
        assert names(loads) == expected_reads
        assert max(n for _, n in loads) - before <= largest
        half = 1.02 * whole / 2  # T5 keeps some layers in fp32
        assert weights_in_memory() - before <= (whole if precision == "fp32" else half)


def test_unload_all_models_frees_unused_store(comfyui, graph, loads):
    before = weights_in_memory()
    graph.run("fp32")
    graph.outputs.clear()  # another workflow was opened
    assert weights_in_memory() > before
    comfyui.management.unload_all_models()
    assert weights_in_memory() == before
    del loads[:]
    graph.run("fp32")
    assert names(loads) == ["text_encoder", "transformer", "vae"], "an emptied store is not used again"


def test_loading_another_model_frees_previous_one(graph, loads, model_folder):
    other = Graph(model_folder("5b"))
    before = weights_in_memory()
    graph.run("fp32")
    one_model = weights_in_memory() - before
    graph.outputs.clear()
    other.run("fp32")
    assert comfy_placement._lingering and comfy_placement._lingering.store
    assert comfy_placement._lingering.store.model.path == other.model
    assert weights_in_memory() - before < 2 * one_model


@pytest.mark.parametrize("offload", ["group", "sequential"])
def test_block_offloaded_weights_are_not_listed_as_loaded_and_are_freed(comfyui, graph, monkeypatch, offload):
    for module in (handles, offloading, stores):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    before = weights_in_memory()
    seen = set()

    def load(models, to_device=comfyui.management.load_models_gpu, **options):
        seen.update(type(model.component).__name__ for model in models)
        to_device(models, **options)

    monkeypatch.setattr(comfyui.management, "load_models_gpu", load)
    graph.offload = offload
    graph.run("fp32")
    assert seen == {"AutoencoderKLCogVideoX"}
    assert not any(m.model and m.model.model_size() for m in comfyui.management.current_loaded_models)
    graph.offload = "none"
    graph.run("fp32")
    assert "CogVideoXTransformer3DModel" in seen, "whole again"
    graph.offload = offload
    graph.run("fp32")
    loaded = [m.model.component for m in comfyui.management.current_loaded_models if m.model and m.model.model_size()]
    assert loaded == []
    comfyui.management.unload_all_models()
    graph.outputs.clear()
    assert weights_in_memory() == before
