"""A minimal ComfyUI for tests: stand-ins for the modules of ComfyUI that this pack uses."""

from __future__ import annotations

import html
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import host
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - fixture for all tests in this folder
from hub_server import files, server  # noqa: F401 - also


class LoadedModel:
    """As ComfyUI's: holds the model by a weak reference."""

    def __init__(self, model):
        self._model = weakref.ref(model)

    @property
    def model(self) -> Any:
        return self._model()

    def model_load(self):
        self.model.partially_load(self.model.load_device, 1e32, force_patch_weights=False)

    def model_unload(self):
        self.model.detach()


class Management(types.SimpleNamespace):
    """Stand-in for ComfyUI's model_management: loads, unloads and frees models."""

    def __init__(self):
        super().__init__(current_loaded_models=[], freed=[], interrupted=False, LoadedModel=LoadedModel)

    def get_torch_device(self):
        return torch.device("cpu")

    def minimum_inference_memory(self):
        return 1000

    def free_memory(self, n_bytes, device):
        self.freed.append(n_bytes)

    def load_models_gpu(self, models, memory_required=0):
        for model in models:
            self.current_loaded_models[:] = [loaded for loaded in self.current_loaded_models if loaded.model]
            if not any(loaded.model is model for loaded in self.current_loaded_models):
                self.current_loaded_models.insert(0, LoadedModel(model))
                self.current_loaded_models[0].model_load()

    def unload_all_models(self):
        while self.current_loaded_models:
            loaded = self.current_loaded_models.pop()
            assert loaded.model is not None, "a model was freed while unloading, which ComfyUI does not expect"
            loaded.model_unload()

    def soft_empty_cache(self):
        pass

    def throw_exception_if_processing_interrupted(self):
        if self.interrupted:
            raise KeyError("InterruptProcessingException")


@pytest.fixture
def without_comfyui(model_folder, tmp_path):
    """A process without ComfyUI, with the small models that tests share."""
    with host.plain_folders(models=[model_folder("2b").parent], input=tmp_path, output=tmp_path):
        yield


@pytest.fixture
def own_folder(tmp_path):
    """A process without ComfyUI that looks for models in this folder, which is empty at first."""
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        yield tmp_path


@pytest.fixture
def comfyui(model_folder, monkeypatch, tmp_path):
    from comfyui_onediff_guard.comfyui_host import placement as comfy_placement

    monkeypatch.setattr(comfy_placement, "_lingering", None)
    management, bars = Management(), []

    class Bar:
        def __init__(self, total):
            bars.append([])

        def update_absolute(self, done, total, picture=None):
            bars[-1].append((done, total))

    root = str(model_folder("2b").parent)
    paths = types.SimpleNamespace(
        get_folder_paths=lambda name: [root] if name == "diffusers" else [],
        get_filename_list=lambda _name: [],
        get_user_directory=lambda: str(tmp_path / "user"),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    monkeypatch.setitem(sys.modules, "comfy.utils", types.SimpleNamespace(ProgressBar=Bar))
    sent, texts = [], []  # sent: as sent to the page; texts: (node id, text as the page shows it)

    def send_progress_text(text, node_id, _client):
        sent.append(text)
        texts.append((node_id, html.unescape(text)))

    instance = types.SimpleNamespace(send_progress_text=send_progress_text, client_id="page")
    monkeypatch.setitem(
        sys.modules, "server", types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    )
    return types.SimpleNamespace(management=management, bars=bars, sent=sent, texts=texts)
