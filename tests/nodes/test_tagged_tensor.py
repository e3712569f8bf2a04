"""Prompts and latents name their own model in the error when a layer of another model cannot take them."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.tagged_tensor import TaggedTensor, latents_of, plain, prompt_of
from comfyui_onediff_guard.trust.message import BadInput
from safetensors.torch import load_file, save_file

PROMPT = prompt_of(torch.randn(1, 5, 16), "CogVideoX-2B", "Sample CogVideoX")
LATENTS = latents_of(torch.randn(1, 16, 3, 4, 4), "CogVideoX-2B")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_error_for_prompt_in_other_model_names_its_own_model(mode) -> None:
    context = torch.cat([PROMPT.to(torch.float32), torch.zeros(1, 5, 16)]).repeat(1, 2, 1)
    with mode(), pytest.raises(BadInput, match=r"\[1, 5, 16\] was encoded for CogVideoX-2B.*Sample CogVideoX; for a K"):
        torch.nn.Linear(8, 4)(context)
    with mode(), pytest.raises(BadInput, match="mat1 and mat2"):
        torch.nn.functional.linear(context, torch.zeros(4, 8))


def test_error_for_latents_in_other_model_names_their_own_model() -> None:
    with pytest.raises(BadInput, match=r"latents \[1, 16, 3, 4, 4\] were made by CogVideoX-2B.*Decode Latents"):
        torch.nn.Conv2d(4, 8, 3)((LATENTS / 2).to(torch.float32)[:, :, 0])


def test_tagged_tensors_act_as_plain_tensors_where_shapes_agree(tmp_path) -> None:
    output = torch.nn.Conv3d(16, 2, 1)(LATENTS)
    assert type(output) is torch.Tensor
    layer = torch.nn.Linear(16, 4)
    assert torch.equal(layer(PROMPT), layer(plain(PROMPT))) and type(layer(PROMPT)) is torch.Tensor
    assert type(plain(PROMPT)) is torch.Tensor and plain(PROMPT).data_ptr() == PROMPT.data_ptr()
    save_file({"samples": LATENTS.contiguous()}, tmp_path / "latents.safetensors")
    assert torch.equal(load_file(tmp_path / "latents.safetensors")["samples"], plain(LATENTS))


def test_other_errors_stay_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shape") as error:
        PROMPT.view(7, 7)
    assert not isinstance(error.value, BadInput)
    assert isinstance(PROMPT + 1, TaggedTensor) and (PROMPT + 1).label == PROMPT.label
