"""ComfyUI's prompt worker beside runs of the same process in other threads."""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROUNDS = 5
shown: list[torch.Tensor] = []  # what graphs ended in


class Show:
    """Keeps the images of a graph."""

    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    INPUT_TYPES = classmethod(lambda cls: {"required": {"images": ("IMAGE",)}})

    def show(self, images: torch.Tensor) -> dict[str, Any]:
        shown.append(images)
        return {"ui": {}}


def _graph(model: str, seed: int) -> dict[str, Any]:
    given = {
        "1": ("LoadPipeline", {"model": model, "precision": "bf16", "backend": "eager", "offload": "none"}),
        "2": ("EncodePrompt", {"pipeline": ["1", 0], "prompt": f"a red kite {seed}", "negative_prompt": "grey"}),
        "3": ("SampleCogVideoX", {"pipeline": ["1", 0], "positive": ["2", 0], "negative": ["2", 1], "seed": seed}),
        "4": ("DecodeLatents", {"pipeline": ["1", 0], "latents": ["3", 0]}),
    }
    sizes = {"width": 32, "height": 32, "frames": 5, "steps": 2}
    mappings = sys.modules["custom_nodes_pack"].NODE_CLASS_MAPPINGS
    graph: dict[str, Any] = {"5": {"class_type": "Show", "inputs": {"images": ["4", 0]}}}
    for number, (name, inputs) in given.items():
        schema = mappings[f"OneDiffGuard{name}"].INPUT_TYPES()
        known = {**schema["required"], **schema.get("optional", {})}
        defaults = {key: options[1]["default"] for key, options in known.items() if "default" in options[1]}
        inputs = defaults | {key: size for key, size in sizes.items() if key in known} | inputs
        graph[number] = {"class_type": f"OneDiffGuard{name}", "inputs": inputs}
    return graph


def _worker(graphs: list[dict[str, Any]]) -> None:
    """As main.py's prompt_worker executes them."""
    server = SimpleNamespace(client_id=None, last_node_id=None, last_prompt_id=None, send_sync=lambda *_: None)
    executor_type = import_module("execution").PromptExecutor
    newer = "cache_args" in inspect.signature(executor_type).parameters
    room = {"cache_args": {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}} if newer else {}  # GiB to be left free
    executor = executor_type(server, **room)
    for number, graph in enumerate(graphs):
        executor.execute(graph, str(number), {}, ["5"])
        assert executor.success, executor.status_messages


def _in_process(folder: Path, seed: int) -> torch.Tensor:
    """As a script of the same process runs a pipeline."""
    pack = "custom_nodes_pack"
    load = import_module(f"{pack}.pipelines.run.handle").load
    families, policy = (
        import_module(f"{pack}.{name}") for name in ("pipelines.families.cogvideox", "precision.policy")
    )
    sampling = import_module(f"{pack}.pipelines.run.sample")
    options = {
        "backend": "eager",
        "offload": "model",
        "placement": import_module(f"{pack}.comfyui_host.host").placement(),
    }
    with torch.inference_mode():
        handle = load(folder, families.COGVIDEOX, precision=policy.Precision("fp32"), **options)
        (positive, negative), _ = import_module(f"{pack}.pipelines.run.encode").encode_prompts(handle, ["a boat", ""])
        settings = sampling.SampleSettings(32, 32, steps=2, seed=seed, frames=5, guidance_scale=6.0)
        latents, _ = sampling.sample(handle, positive, negative, settings)
        return import_module(f"{pack}.pipelines.run.decode").decode(handle, latents)[0]


def _small_models() -> Any:
    """What builds them. It knows the pack by the name that it is installed by, and uses its demo alone."""
    sys.modules["comfyui_onediff_guard"] = sys.modules["custom_nodes_pack"]
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    return import_module("small_families").BUILDERS


def case_worker() -> dict[str, Any]:
    build = _small_models()
    nodes = import_module("nodes")
    nodes.NODE_CLASS_MAPPINGS.update(sys.modules["custom_nodes_pack"].NODE_CLASS_MAPPINGS, Show=Show)
    sys.modules["server"].PromptServer.instance = SimpleNamespace(send_progress_text=lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.nn.Module.register_parameter
    with tempfile.TemporaryDirectory() as folder:
        models = [build[name](Path(folder) / name) for name in ("2b", "5b")]
        import_module("folder_paths").add_model_folder_path("diffusers", folder)
        graphs = [_graph("2b", seed) for seed in range(ROUNDS)]
        _worker(graphs)
        expected = shown[:]
        beside = [_in_process(model, 7) for model in models]  # the same model as the worker's, and another
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
    return {
        "shown": len(expected),
        "the worker's are equal": [torch.equal(a, b) for a, b in zip(shown, expected, strict=True)],
        "the others' are equal": [
            torch.equal(made, right) for all_made, right in zip(found, beside, strict=True) for made in all_made
        ],
        "put back": [torch.nn.Module.register_parameter is before, torch.get_default_dtype() is torch.float32],
    }
