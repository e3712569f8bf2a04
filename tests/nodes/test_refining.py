"""What a model of ComfyUI's prepares with layers of its own, before it samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.refining import refining_guarded
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure

LARGE = 3e4


class Network(torch.nn.Module):
    """Makes keys and values of a prompt, as SenseNova's network does of its prefix."""

    def __init__(self, scale: float):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False).half()
        with torch.no_grad():
            self.layer.weight.copy_(scale * torch.eye(4))
        self.dtype = torch.float16

    def preprocess_prefix(self, text: torch.Tensor) -> Any:
        keys = self.layer(text)
        return SimpleNamespace(layers=[{"keys": keys}, {"values": keys / LARGE}])


class Model:
    """As a BaseModel: what it prepares is in objects of ComfyUI's classes for conditions."""

    def __init__(self, scale: float = 1.0, **more: Any):
        self.diffusion_model = Network(scale)
        self.manual_cast_dtype = torch.float16
        self.model_config = SimpleNamespace()
        self.more = more

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        prefix = self.diffusion_model.preprocess_prefix(given["cross_attn"].to(torch.float16))
        return {"prefix": SimpleNamespace(cond=prefix), **self.more}


def prepared(model: Model, text: float = 4.0, **policy: Any) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    view = refining_guarded(model, GuardPolicy(**policy), told.append)
    return view.extra_conds(cross_attn=torch.full((1, 4), text), device=torch.device("cpu")), told


@pytest.mark.parametrize("more", [{}, {"mask": SimpleNamespace(cond=torch.tensor([0.0, -torch.inf]))}])
@pytest.mark.parametrize("text", [4.0, -4.0])
def test_an_overflow_in_what_an_object_holds_is_prepared_again_in_fp32(text: float, more: dict[str, Any]) -> None:
    made, told = prepared(Model(LARGE, **more), text)
    assert made["prefix"].cond.layers[0]["keys"].tolist() == [[text * LARGE] * 4]
    assert told == ["prefix: NaN or infinite in fp16, prepared again in fp32"]


def test_what_is_healthy_stays_as_it_is() -> None:
    made, told = prepared(Model())
    assert made["prefix"].cond.layers[0]["keys"].dtype == torch.float16 and told == []


def test_a_mask_is_right() -> None:
    mask = SimpleNamespace(cond=torch.tensor([0.0, -torch.inf]))
    made, told = prepared(Model(mask=mask))
    assert made["mask"] is mask and made["prefix"].cond.layers[0]["keys"].dtype == torch.float16 and told == []


@pytest.mark.parametrize(
    ("model", "text", "policy", "error"),
    [
        (Model(LARGE), 4.0, {"on_failure": OnFailure.STOP}, r"prepares itself \('prefix'\).*is set to stop"),
        (Model(torch.nan), 4.0, {}, r"'prefix'.* and in fp32 too, from a prompt that is finite"),
    ],
)
def test_what_fp32_does_not_help_ends_the_run(model: Model, text: float, policy: Any, error: str) -> None:
    with pytest.raises(GuardStopped, match=error):
        prepared(model, text, **policy)


def test_a_broken_prompt_is_its_own_stages_matter() -> None:
    made, told = prepared(Model(), torch.nan)
    assert made["prefix"].cond.layers[0]["keys"].isnan().all() and told == []
