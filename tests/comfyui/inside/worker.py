"""ComfyUI's prompt worker and runs in other threads of its process: each gives the same result as alone."""

from __future__ import annotations

import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_comfyui import OURS, PACK, SUPPORT, module

ROUNDS = 5
shown: list[torch.Tensor] = []  # images of all graphs


class Show:
    """A node that records the images of a graph."""

    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    INPUT_TYPES = classmethod(lambda cls: {"required": {"images": ("IMAGE",)}})

    def show(self, images: torch.Tensor) -> dict[str, Any]:
        shown.append(images)
        return {"ui": {}}


def _graph(model: str, seed: int) -> dict[str, Any]:
    api_node, sizes = import_module("as_comfyui").api_node, {"width": 32, "height": 32, "frames": 5, "steps": 2}
    return {
        "1": api_node("LoadPipeline", model=model, precision="bf16", backend="eager", offload="none"),
        "2": api_node("EncodePrompt", pipeline=["1", 0], prompt=f"a red kite {seed}", negative_prompt="grey"),
        "3": api_node("SampleCogVideoX", pipeline=["1", 0], positive=["2", 0], negative=["2", 1], seed=seed, **sizes),
        "4": api_node("DecodeLatents", pipeline=["1", 0], latents=["3", 0]),
        "5": {"class_type": "Show", "inputs": {"images": ["4", 0]}},
    }


def _worker(graphs: list[dict[str, Any]]) -> None:
    """Execute graphs as main.py's prompt_worker does."""
    server = SimpleNamespace(client_id=None, last_node_id=None, last_prompt_id=None, send_sync=lambda *_: None)
    executor_type = import_module("execution").PromptExecutor
    newer = "cache_args" in inspect.signature(executor_type).parameters
    room = {"cache_args": {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}} if newer else {}  # GiB to keep free
    executor = executor_type(server, **room)
    for number, graph in enumerate(graphs):
        executor.execute(graph, str(number), {}, ["5"])
        assert executor.success, executor.status_messages


def _in_process(folder: Path, seed: int) -> torch.Tensor:
    """Run a pipeline as a script in the same process does."""
    load, sampling = module("pipelines.run.handle").load, module("pipelines.run.sample")
    options = {"backend": "eager", "offload": "model", "placement": module("comfyui_host.host").placement()}
    fp32 = module("precision.policy").Precision("fp32")
    with torch.inference_mode():
        handle = load(folder, module("pipelines.families.cogvideox").COGVIDEOX, precision=fp32, **options)
        (positive, negative), _ = module("pipelines.run.encode").encode_prompts(handle, ["a boat", ""])
        settings = sampling.SampleSettings(32, 32, steps=2, seed=seed, frames=5, guidance_scale=6.0)
        latents, _ = sampling.sample(handle, positive, negative, settings)
        return module("pipelines.run.decode").decode(handle, latents)[0]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Folders of small models that ComfyUI lists. The builders use only the pack's demo."""
    sys.modules[OURS] = sys.modules[PACK]
    sys.path.append(str(SUPPORT))
    build = import_module("small_families").BUILDERS
    import_module("folder_paths").add_model_folder_path("diffusers", str(tmp_path))
    return [build[name](tmp_path / name) for name in ("2b", "5b")]


def test_concurrent_runs_are_bit_equal_to_single_runs(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = import_module("nodes")
    nodes.NODE_CLASS_MAPPINGS.update(sys.modules[PACK].NODE_CLASS_MAPPINGS, Show=Show)
    server = SimpleNamespace(send_progress_text=lambda *_: None, client_id="page")
    monkeypatch.setattr(sys.modules["server"].PromptServer, "instance", server)  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.nn.Module.register_parameter
    graphs = [_graph("2b", seed) for seed in range(ROUNDS)]
    _worker(graphs)
    expected = shown[:]
    alone = [_in_process(model, 7) for model in models]  # the worker's model, and another one
    shown.clear()
    begin = threading.Barrier(3)

    def repeated(model: Path) -> list[torch.Tensor]:
        begin.wait(600)
        return [_in_process(model, 7) for _ in range(ROUNDS)]

    def worker() -> None:
        begin.wait(600)
        _worker(graphs)

    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(repeated, model) for model in models]
        threads.submit(worker).result(600)
        found = [run.result(600) for run in runs]
    assert len(expected) == ROUNDS
    assert all(torch.equal(made, right) for made, right in zip(shown, expected, strict=True))
    assert all(torch.equal(made, right) for all_made, right in zip(found, alone, strict=True) for made in all_made)
    assert torch.nn.Module.register_parameter is before and torch.get_default_dtype() is torch.float32
