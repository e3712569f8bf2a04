"""What stays in memory under ComfyUI's memory manager, and what goes, from one run of a graph to the next."""

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
    """Bytes of all parameters that live anywhere in this process."""
    gc.collect()
    parameters = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Parameter) and not o.is_meta]
    return sum({p.data_ptr(): p.nbytes for p in parameters}.values())


class Graph:
    """Load → Encode → Sample → Decode, of which ComfyUI keeps the outputs; a node that changed loses its own first."""

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
    """Component and bytes of all weights in memory right after it was read, for each that is read."""
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


def test_comfyuis_memory_manager_holds_what_is_loaded_and_loses_what_is_let_go(comfyui, model_folder):
    pipeline = GRAPH.load(model_folder("2b"), precision="fp32")

    def loaded():
        return [m.model.component for m in comfyui.management.current_loaded_models if m.model and m.model.model_size()]

    GRAPH.encode(pipeline)
    assert loaded() == [], "the text encoder rests after encoding"
    denoiser = pipeline.store.module("transformer", "fp32")
    assert loaded() == [denoiser]
    size = comfyui.management.current_loaded_models[0].model.model_size()
    assert size == sum(p.nbytes for p in (*denoiser.parameters(), *denoiser.buffers()))
    pipeline.store.offload_to_cpu("transformer")
    assert loaded() == []
    assert pipeline.store.module("transformer", "fp32") is denoiser, "moved, not read again"


def test_another_precision_that_comes_to_the_same_reads_nothing(graph, loads):
    graph.run("auto")  # fp32 on a CPU, for a model trained in fp16
    assert names(loads) == ["text_encoder", "transformer", "vae"]
    graph.run("fp32")
    assert names(loads) == ["text_encoder", "transformer", "vae"]


def test_the_samplers_precision_reads_the_denoiser_alone(graph, loads):
    graph.run("fp32")
    del loads[:]
    graph.run("fp32", sampler="bf16")
    assert names(loads) == ["transformer"]


def test_switching_precision_never_leaves_two_copies(graph, loads):
    before = weights_in_memory()
    graph.run("fp32")
    whole = weights_in_memory() - before
    largest = max(whole, *(n - before for _, n in loads))
    for precision, read in (
        ("bf16", ["text_encoder", "transformer", "vae"]),
        ("fp16", ["text_encoder", "transformer", "vae"]),
        ("fp32", ["transformer", "vae"]),  # its prompt is remembered
    ):
        del loads[:]
        graph.run(precision)
        assert names(loads) == read
        assert max(n for _, n in loads) - before <= largest
        half = 1.02 * whole / 2  # T5 keeps some layers in fp32
        assert weights_in_memory() - before <= (whole if precision == "fp32" else half)


def test_a_store_that_nobody_uses_gives_way_when_room_is_needed(comfyui, graph, loads):
    before = weights_in_memory()
    graph.run("fp32")
    graph.outputs.clear()  # another workflow was opened
    assert weights_in_memory() > before
    comfyui.management.unload_all_models()
    assert weights_in_memory() == before
    del loads[:]
    graph.run("fp32")
    assert names(loads) == ["text_encoder", "transformer", "vae"], "what was emptied is not used again"


def test_another_model_takes_the_place_of_the_last_one(graph, loads, model_folder):
    other = Graph(model_folder("5b"))
    before = weights_in_memory()
    graph.run("fp32")
    alone = weights_in_memory() - before
    graph.outputs.clear()
    other.run("fp32")
    assert comfy_placement._lingering and comfy_placement._lingering.store
    assert comfy_placement._lingering.store.model.path == other.model
    assert weights_in_memory() - before < 2 * alone


@pytest.mark.parametrize("offload", ["group", "sequential"])
def test_weights_that_come_in_parts_are_not_said_to_be_on_the_device_and_free_gives_them_back(
    comfyui, graph, monkeypatch, offload
):
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
