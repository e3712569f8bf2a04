"""NaN Guard (native) on models with a text refiner that runs before sampling: MiniMax H3 and LTX-2."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, error_of, guarded, texts, wrapped
from native_models import LAYOUTS, in_fp32, make_model, sample
from probe import facts, probed

TRUNK = {"ltx2": "transformer_blocks.0.ff.net.0.proj.weight", "minimax_h3": "blocks.0.mlp.fc1.weight"}
CLASS = {"ltx2": "LTXAV", "minimax_h3": "MiniMaxH3"}
RAW = {  # channels of unrefined text, a layer of the refiner, and the factor for its weight
    "ltx2": (32, "video_embeddings_connector.transformer_1d_blocks.0.ff.net.0.proj", 6e4),
    "minimax_h3": (40, "token_refiner.blocks.0.mlp.fc1", 3e4),
}
family = pytest.mark.parametrize("family", [name for name in RAW if name in LAYOUTS])


def hot(name: str, *, refiner: bool, trunk: bool) -> Any:
    channels, layer, times = RAW[name]
    layout = replace(LAYOUTS[name], context=(1, 7, channels), hot=layer, times=times, ones={})
    patcher = make_model(layout, hot=refiner)
    if trunk:
        patcher.model.diffusion_model.get_parameter(TRUNK[name]).mul_(3e4)
    return patcher


def sample_with_text(patcher: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample, and return the latents and the text that the network received."""
    given: list[torch.Tensor] = []

    def record_text(executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(args[1].float())  # after c_concat
        return executor(x, t, *args, **kwargs)

    return sample(wrapped(patcher, record_text, "apply_model")), given[0]


@pytest.mark.parametrize("trunk", [False, True])
@family
def test_overflowing_text_refiner_is_recomputed_in_fp32(family: str, trunk: bool) -> None:
    """trunk: layers after the refiner overflow too; otherwise they stay in fp16."""
    patcher = hot(family, refiner=True, trunk=trunk)
    exact, exact_text = sample_with_text(in_fp32(patcher))
    assert not sample_with_text(patcher)[1].isfinite().all()
    made, text = sample_with_text(guarded(patcher))
    assert difference(text, exact_text) <= 1e-5
    assert difference(made, exact) <= (1e-5 if trunk else 2e-2)
    assert ("3 steps, all fine." in texts[-1]) == (not trunk)
    assert "text: NaN or infinite in fp16, recomputed in fp32" in texts[-1]
    assert "extra_conds" not in vars(patcher.model)


@family
def test_healthy_text_refiner_is_bit_equal_with_guard(family: str) -> None:
    patcher = hot(family, refiner=False, trunk=False)
    plain, made = (sample_with_text(each) for each in (patcher, guarded(patcher)))
    assert all(map(torch.equal, plain, made))
    assert "text: " not in texts[-1]
    assert "extra_conds" not in vars(patcher.model)


@family
def test_probe_recommends_fp16_when_only_text_refiner_overflows(family: str) -> None:
    nested = import_module("comfy.nested_tensor").NestedTensor
    latent = {"samples": nested([torch.zeros(shape) for shape in LAYOUTS[family].streams])}
    found = facts(probed(hot(family, refiner=True, trunk=False), latent_image=latent))
    assert found["dtype"] == "fp16"  # for the layers of each step


@family
def test_failing_text_refiner_is_named_in_error(family: str) -> None:
    patcher = hot(family, refiner=True, trunk=False)
    found = f"GuardStopped: Text refiner of {CLASS[family]}: its output in fp16 is NaN or infinite"
    stopped = error_of(lambda: sample(guarded(patcher, on_failure="stop")))
    assert stopped.startswith(f"{found}, and the guard is set to 'stop'.")
    broken = hot(family, refiner=False, trunk=False)
    broken.model.diffusion_model.get_submodule(RAW[family][1]).weight[0, 0] = torch.nan
    assert error_of(lambda: sample(guarded(broken))).startswith(f"{found}, and in fp32 too")
    assert not sample(guarded(patcher, on_failure="off")).isfinite().all()
