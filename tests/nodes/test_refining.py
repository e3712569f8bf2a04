"""Conditions that a native model prepares with its own layers before sampling: guarded and recomputed in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.refining import refining_guarded
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure

LARGE = 3e4


class Network(torch.nn.Module):
    """Computes keys and values of a prompt, as SenseNova's network does of its prefix."""

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
    """As ComfyUI's BaseModel: prepared conditions are objects with an attribute `cond`."""

    def __init__(self, scale: float = 1.0, **more: Any):
        self.diffusion_model = Network(scale)
        self.manual_cast_dtype = torch.float16
        self.model_config = SimpleNamespace()
        self.more = more

    def extra_conds(self, **options: Any) -> dict[str, Any]:
        prefix = self.diffusion_model.preprocess_prefix(options["cross_attn"].to(torch.float16))
        return {"prefix": SimpleNamespace(cond=prefix), **self.more}


def prepared(model: Model, text: float = 4.0, **policy: Any) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    view = refining_guarded(model, GuardPolicy(**policy), messages.append)
    return view.extra_conds(cross_attn=torch.full((1, 4), text), device=torch.device("cpu")), messages


WITH_MASK = [{}, {"mask": SimpleNamespace(cond=torch.tensor([0.0, -torch.inf]))}]


@pytest.mark.parametrize("more", WITH_MASK)
@pytest.mark.parametrize("text", [4.0, -4.0])
def test_overflow_in_prepared_condition_is_recomputed_in_fp32(text: float, more: dict[str, Any]) -> None:
    conds, messages = prepared(Model(LARGE, **more), text)
    assert conds["prefix"].cond.layers[0]["keys"].tolist() == [[text * LARGE] * 4]
    assert messages == ["prefix: NaN or infinite in fp16, recomputed in fp32"]


@pytest.mark.parametrize("more", WITH_MASK)
def test_finite_condition_stays_in_fp16_and_mask_with_infinite_values_as_it_is(more: dict[str, Any]) -> None:
    conds, messages = prepared(Model(**more))
    assert conds["prefix"].cond.layers[0]["keys"].dtype == torch.float16 and messages == []
    assert conds.get("mask") is more.get("mask")


@pytest.mark.parametrize(
    ("model", "text", "policy", "error"),
    [
        (Model(LARGE), 4.0, {"on_failure": OnFailure.STOP}, r"computing its input 'prefix'.*is set to 'stop'"),
        (Model(torch.nan), 4.0, {}, r"'prefix'.* and in fp32 too, although the prompt is finite"),
    ],
)
def test_condition_that_is_not_recovered_stops_run(model: Model, text: float, policy: Any, error: str) -> None:
    with pytest.raises(GuardStopped, match=error):
        prepared(model, text, **policy)


def test_non_finite_prompt_is_not_reported_by_this_stage() -> None:
    conds, messages = prepared(Model(), torch.nan)
    assert conds["prefix"].cond.layers[0]["keys"].isnan().all() and messages == []
