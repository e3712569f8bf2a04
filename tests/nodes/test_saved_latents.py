"""Sample, save the latents, decode them later: in another process, and after a decode that failed."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from as_comfyui import GRAPHS, call, load_latent, save_latent
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.precision.guard import GuardStopped
from comfyui_onediff_guard.trust.message import BadInput

LATER = """
import json, sys
from pathlib import Path
tests, root, *families = sys.argv[1:]
sys.path.insert(0, tests)
import torch
from as_comfyui import GRAPHS, load_latent
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.weights.components import ComponentStore

read, load = [], ComponentStore._load
ComponentStore._load = lambda store, name, dtype: read.append(name) or load(store, name, dtype)
with host.plain_folders(models=[Path(root)], input=Path(), output=Path()):
    for family in families:
        folder, latent, images = (Path(root) / name for name in json.loads(family)[1:])
        graph = GRAPHS[json.loads(family)[0]]
        decoded = graph.decode(graph.load(folder, precision="fp32"), load_latent(latent))
        torch.save(decoded["result"][0], images)
print(json.dumps(read))
"""


@pytest.fixture
def folders(model_folder, tmp_path) -> Iterator[Path]:
    root = model_folder("2b").parent
    with host.plain_folders(models=[root], input=tmp_path, output=tmp_path):
        yield root


def sampled(family, folder, **settings):
    """(pipeline, latents)."""
    gc.collect()  # the pipelines of the tests before
    graph = GRAPHS[family]
    pipeline = graph.load(folder, precision="fp32")
    prompts = graph.encode(pipeline)["result"] if graph.prompted else ()
    return pipeline, graph.sample(pipeline, prompts, **settings)["result"][0]


def test_every_familys_latents_decode_in_another_process(folders, model_folder, fresh_python, root, tmp_path):
    expected, later = {}, []
    for family, graph in GRAPHS.items():
        folder = model_folder(family.split()[0])
        pipeline, latents = sampled(family, folder)
        file = tmp_path / f"{family}.latent"
        save_latent(latents, file)
        assert torch.equal(load_latent(file)["samples"], latents["samples"])
        expected[family] = graph.decode(pipeline, latents)["result"][0]
        later.append(json.dumps([family, folder.name, str(file), str(tmp_path / f"{family}.pt")]))
    printed = fresh_python(LATER, str(root / "tests" / "support"), str(folders), *later, OMP_NUM_THREADS="1")
    assert set(json.loads(printed.splitlines()[-1])) == {"vae"}, "nothing else is read for it"
    for family, images in expected.items():
        found = torch.load(tmp_path / f"{family}.pt")
        assert (found - images).abs().max() < 1e-5, family


DAMAGES = {
    "NaN": (
        lambda tensor: tensor.index_fill(-1, torch.tensor([0]), float("nan")),
        GuardStopped,
        "values are NaN or infinite already",
    ),
    "infinite": (lambda tensor: tensor * float("inf"), GuardStopped, "values are NaN or infinite already"),
    "a dimension short": (lambda tensor: tensor[0], BadInput, r"have shape \(16, 3, 4, 4\), but CogVideoX-2B decodes"),
    "channels lost": (
        lambda tensor: tensor[:, :7],
        BadInput,
        r"\(1, 7, 3, 4, 4\).*\[batch, 16, frames, height, width\]",
    ),
    "empty": (lambda tensor: tensor[:0], BadInput, r"have shape \(0, 16, 3, 4, 4\)"),
    "no frame": (lambda tensor: tensor[:, :, :0], BadInput, r"have shape \(1, 16, 0, 4, 4\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_latents_are_named_before_a_weight_is_read(folders, model_folder, tmp_path, damage):
    change, error, message = DAMAGES[damage]
    pipeline, latents = sampled("2b", model_folder("2b"))
    whole, broken = tmp_path / "whole.latent", tmp_path / "broken.latent"
    save_latent(latents, whole)
    save_latent({"samples": change(latents["samples"]).contiguous()}, broken)
    loaded = pipeline.store.loaded()
    for guarded in ("rerun", "stop"):
        (handle,) = call("NaNGuard", pipeline=pipeline, on_failure=guarded)["result"]
        with pytest.raises(error, match=message):
            GRAPHS["2b"].decode(handle, load_latent(broken))
        assert pipeline.store.loaded() == loaded
    images = GRAPHS["2b"].decode(pipeline, load_latent(whole))["result"][0]
    assert torch.isfinite(images).all(), "the next run works, without a step more"


def test_a_decode_that_fails_costs_no_step(folders, model_folder, monkeypatch, tmp_path):
    """Out of memory in the decoder: what was sampled is there still, and tiles decode it."""
    from diffusers import AutoencoderKLCogVideoX

    pipeline, latents = sampled("2b", model_folder("2b"))
    before = latents["samples"].clone()
    with monkeypatch.context() as full:
        full.setattr(AutoencoderKLCogVideoX, "decode", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            GRAPHS["2b"].decode(pipeline, latents)
    assert torch.equal(latents["samples"], before)
    images = GRAPHS["2b"].decode(pipeline, latents, tiling=True)["result"][0]
    assert torch.isfinite(images).all()


OTHERS = [("cogview3", "2b"), ("2b", "svd"), ("svd", "cogview4"), ("cogview3", "cogview4"), ("cogview4", "cogview3")]


@pytest.mark.parametrize(("made_by", "decoded_by"), OTHERS)
def test_latents_of_another_family_are_refused(folders, model_folder, made_by, decoded_by):
    _, latents = sampled(made_by, model_folder(made_by))
    graph = GRAPHS[decoded_by]
    pipeline = graph.load(model_folder(decoded_by), precision="fp32")
    with pytest.raises(BadInput, match="Wire them from a"):
        graph.decode(pipeline, latents)
    assert pipeline.store.loaded() == {}


def test_latents_of_another_model_of_the_family_are_decoded(folders, model_folder):
    _, latents = sampled("5b-i2v", model_folder("5b-i2v"))
    pipeline = GRAPHS["5b"].load(model_folder("5b"), precision="fp32")
    assert torch.isfinite(GRAPHS["5b"].decode(pipeline, latents)["result"][0]).all()
