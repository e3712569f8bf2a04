"""Tensors on ComfyUI's wires that name their model in the error message if a layer of another model cannot take them.

Any pack's nodes accept CONDITIONING and LATENT, which do not say which model they are for: a CogVideoX prompt that is
wired into a KSampler ends in PyTorch's error on the shapes of two matrices. If the shapes fit, the label does nothing:
ComfyUI's own SVD has the same latents as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ..trust.message import BadInput, Message

_LAYERS = {functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.matmul, torch.addmm, torch.mm}
_LAYERS |= {functional.conv1d, functional.conv2d, functional.conv3d, functional.layer_norm, functional.group_norm}


class TaggedTensor(torch.Tensor):
    """A tensor with a label. Results of functions keep the label; the output of a network's layer is a plain tensor."""

    label = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = next((each.label for each in _tensors((*args, *(kwargs or {}).values())) if each.label), "")
        try:
            made = super().__torch_function__(func, types, args, kwargs or {})
        except RuntimeError as error:
            if func not in _LAYERS or not given or isinstance(error, torch.OutOfMemoryError):
                raise
            raise BadInput("{} ({}: {})", given, func.__name__, str(error).splitlines()[0]) from error
        if func in _LAYERS:
            return plain(made)
        for tensor in _tensors(made if isinstance(made, (tuple, list)) else [made]):
            tensor.label = given
        return made


def _tensors(values: Any) -> list[TaggedTensor]:
    """Return the tagged tensors among values, and in lists and tuples among them, as `torch.cat` takes them."""
    return [
        each
        for value in values
        for each in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(each, TaggedTensor)
    ]


def labelled(tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Return a tensor with the same values and a label: the error message if a layer cannot take it."""
    made = tensor.as_subclass(TaggedTensor)
    made.label = label
    return made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, TaggedTensor) else tensor


def prompt_of(embeddings: torch.Tensor, model: str, sampler: str) -> torch.Tensor:
    """Return embeddings [batch, tokens, channels], labelled as a model's. sampler: titles of nodes that take them."""
    label = Message(
        "This CONDITIONING {} was encoded for {}, and another model cannot use it. Connect it to {}; for a KSampler, "
        "encode the prompt with the text encoder of that sampler's model.",
        _shape(embeddings),
        model,
        sampler,
    )
    return labelled(embeddings, label)


def latents_of(latents: torch.Tensor, model: str) -> torch.Tensor:
    """Return latents, labelled as a model's."""
    label = Message(
        "These latents {} were made by {}, and another model cannot use them. Connect them to Decode Latents, with "
        "the pipeline that made them.",
        _shape(latents),
        model,
    )
    return labelled(latents, label)


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
