"""The fp32 rerun and half tensors that are written to, viewed, or read as bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from torch import nn
from torch.nn import functional as F


def in_place(buffer):
    buffer.add_(1)
    buffer[0] = 7
    buffer[1:].mul_(2)
    buffer.view(-1)[2] = 9
    buffer.copy_(buffer * 2)
    torch.add(buffer, 1, out=buffer)
    F.relu(buffer, inplace=True)
    F.hardtanh(buffer, -1, 40, inplace=True)
    buffer += 0.5
    return buffer


@pytest.mark.parametrize("inference_mode", [False, True])
def test_in_place_writes_reach_half_tensors_and_their_aliases(inference_mode):
    expected = in_place(torch.arange(4.0))
    buffer = torch.arange(4, dtype=torch.float16)
    alias = buffer[1:]
    with torch.inference_mode(inference_mode):
        returned = run_in_fp32(lambda: in_place(buffer))
    assert buffer.dtype == torch.float16
    assert torch.equal(buffer.float(), expected)
    assert torch.equal(alias.float(), expected[1:])
    assert torch.equal(returned.float(), expected)


def test_in_place_on_an_argument_reaches_the_caller_and_is_computed_in_float32():
    x = torch.full((2,), 1000.0, dtype=torch.float16)

    def square_root_of_square(t):
        t.mul_(t)
        return t.sqrt_()

    assert run_in_fp32(square_root_of_square, x).tolist() == [1000.0, 1000.0]
    assert x.dtype == torch.float16 and x.tolist() == [1000.0, 1000.0]


def test_copies_of_half_tensors_are_float32_so_that_writes_do_not_round():
    table = torch.full((4, 2), 60000.0, dtype=torch.float16)
    rows = run_in_fp32(lambda: table[torch.tensor([1, 2])].mul_(4))
    assert rows.dtype == torch.float32 and rows.max() == 240000
    assert table.max() == 60000


def test_views_of_any_kind_alias_the_half_tensor():
    def write(buffer):
        for row in buffer:
            row.add_(1)
        buffer.ravel()[0] = 7
        buffer.tensor_split(3)[2].add_(5)
        buffer.unsqueeze_(0)
        buffer.real.mul_(2)
        torch.movedim(buffer, 0, 1).add_(0.5)
        buffer.T.sub_(1) if buffer.ndim == 2 else buffer.mT.sub_(1)
        return buffer

    expected = write(torch.zeros(3, 2))
    buffer = torch.zeros(3, 2, dtype=torch.float16)
    run_in_fp32(lambda: write(buffer))
    assert torch.equal(buffer.float(), expected)


def test_views_asked_for_by_keyword_alias_too():
    buffer = torch.zeros(2, 3, dtype=torch.float16)

    def write():
        torch.transpose(input=buffer, dim0=0, dim1=1).add_(1)
        torch.split(tensor=buffer, split_size_or_sections=1)[1].add_(1)

    run_in_fp32(write)
    assert buffer.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_bits_are_reinterpreted_not_cast():
    packed = torch.tensor([1.5, -2.0], dtype=torch.float16).view(torch.uint8)
    assert run_in_fp32(lambda: packed.view(torch.float16) * 1).tolist() == [1.5, -2.0]
    assert run_in_fp32(lambda: packed.view(dtype=torch.float16) * 1).tolist() == [1.5, -2.0]
    weight = torch.tensor([1.5], dtype=torch.float16)
    assert run_in_fp32(lambda: weight.view(torch.int16)).tolist() == weight.view(torch.int16).tolist()


def test_setting_data_keeps_the_dtype():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16), requires_grad=False)

    def swap():
        parameter.data = torch.ones(2)

    run_in_fp32(swap)
    assert parameter.dtype == torch.float16 and parameter.tolist() == [1.0, 1.0]


OF = {dtype: torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
TYPE = {dtype: tensor.type() for dtype, tensor in OF.items()}
BY_NAME = {torch.float16: torch.Tensor.half, torch.bfloat16: torch.Tensor.bfloat16, torch.float32: torch.Tensor.float}
COPIES: dict[str, Any] = {
    "half()": lambda x: x.half(),
    "bfloat16()": lambda x: x.bfloat16(),
    "type(dtype)": lambda x: x.type(torch.float16),
    "type(str)": lambda x: x.type("torch.HalfTensor"),
    "type(class)": lambda x: x.type(torch.BFloat16Tensor),
    "to(dtype)": lambda x: x.to(torch.float16),
    "to(keyword)": lambda x: x.to(dtype=torch.bfloat16),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float16),
    "to(tensor)": lambda x: x.to(OF[torch.float16]),
    "to(tensor=)": lambda x: x.to(tensor=OF[torch.float16]),
    "to(memory_format)": lambda x: x.to(torch.float16, memory_format=torch.channels_last),
    "type_as": lambda x: x.type_as(OF[torch.float16]),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float16),
    "asarray": lambda x: torch.asarray(x, dtype=torch.float16),
    "to(copy)": lambda x: x.to(x.dtype, copy=True),
}
ALIASES: dict[str, Any] = {
    "to(dtype)": lambda x, dtype: x.to(dtype),
    "to(device)": lambda x, _dtype: x.to("cpu"),
    "to(device, dtype)": lambda x, dtype: x.to("cpu", dtype),
    "to(tensor)": lambda x, dtype: x.to(OF[dtype]),
    "type(dtype)": lambda x, dtype: x.type(dtype),
    "type(str)": lambda x, dtype: x.type(TYPE[dtype]),
    "type_as": lambda x, dtype: x.type_as(OF[dtype]),
    "by name": lambda x, dtype: BY_NAME[dtype](x),
    "as_tensor": lambda x, dtype: torch.as_tensor(x, dtype=dtype),
    "asarray": lambda x, dtype: torch.asarray(x, dtype=dtype),
}


def written_to(convert: Callable[..., torch.Tensor], source: torch.Tensor, *more: Any) -> tuple[Any, Any]:
    """What was made of the source after a write to it, and the source then."""
    made = convert(source, *more)
    made.add_(1)
    return made, source


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.int64])
def test_what_is_converted_to_half_is_a_copy(form, given):
    tensor = torch.full((1, 2, 3, 4), 3, dtype=given)
    made, source = run_in_fp32(lambda: written_to(COPIES[form], tensor))
    assert source.eq(3).all(), "as it is outside"
    assert made.eq(4).all() and made.dtype == (given if form == "to(copy)" else torch.float32)
    assert made.is_contiguous(memory_format=torch.channels_last) == (form == "to(memory_format)")


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16])
def test_a_half_tensor_in_float32_is_a_copy(given):
    for convert in (torch.Tensor.float, lambda x: x.to(torch.float32), lambda x: x.type("torch.FloatTensor")):
        tensor = torch.full((2,), 3.0, dtype=given)
        made, _ = run_in_fp32(lambda: written_to(convert, tensor))  # noqa: B023
        assert tensor.eq(3).all() and made.eq(4).all() and made.dtype == torch.float32


@pytest.mark.parametrize("form", ALIASES)
@pytest.mark.parametrize("given", OF)
def test_what_has_the_dtype_that_is_asked_for_is_not_copied(form, given):
    expected = written_to(ALIASES[form], torch.full((1, 2, 3, 4), 3.0, dtype=given), given)[1]
    tensor = torch.full((1, 2, 3, 4), 3.0, dtype=given)
    run_in_fp32(lambda: written_to(ALIASES[form], tensor, given))
    assert torch.equal(tensor, expected) and tensor.eq(4).all()


def test_a_tensors_type_is_told_as_float32():
    assert run_in_fp32(lambda: torch.ones(1, dtype=torch.float16).type()) == "torch.FloatTensor"


def test_what_is_put_into_a_list_or_a_dict_is_there_for_the_caller():
    half = torch.ones(2, dtype=torch.float16)
    queue, cache = [half], {"first": half, "gone": half}

    def remember(queue, cache):
        queue[0].mul_(2)
        queue.append(queue[0] + 1)
        cache["second"] = cache.pop("gone") + 1

    run_in_fp32(remember, queue, cache)
    assert queue[0] is cache["first"] is half and half.tolist() == [2, 2] and half.dtype == torch.float16
    assert queue[1].tolist() == cache["second"].tolist() == [3, 3] and [*cache] == ["first", "second"]
