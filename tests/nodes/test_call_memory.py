"""What a network, and the caches beside it, remember of a call that is made again, without ComfyUI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.calls import CallMemory

FP16 = torch.float16
Written = Callable[[Any, dict[str, Any]], Any]  # of a network and options → what a call reads before it writes


def beside_in_a_dict(_network: Any, options: dict[str, Any]) -> Any:
    before = dict(options["cache"])
    options["cache"]["keys"] = options["cache"].get("keys", 0) + 1
    return before


def beside_in_a_nested_list(_network: Any, options: dict[str, Any]) -> Any:
    before = [*options["nested"][0]["layers"]]
    options["nested"][0]["layers"].append(1)
    return before


def beside_in_an_object(_network: Any, options: dict[str, Any]) -> Any:
    before = options["holder"].state
    options["holder"].state = 1 if before is None else before + 1
    return before


def in_the_easycache(_network: Any, options: dict[str, Any]) -> Any:
    before = options["easycache"].skipped
    options["easycache"].skipped = before + 1
    return before


def within_the_network(network: Any, _options: dict[str, Any]) -> Any:
    before = dict(network.cache)
    network.cache["keys"] = len(before) + 1
    network.added = True
    return before


class Prefix:
    """Keys of a prompt's start, as Qwen-Image 2.1 keeps them in an object on its network."""

    __slots__ = ("keys", "layers", "network")

    def __init__(self, network: Any):
        self.keys, self.layers, self.network = torch.zeros(2), {0: deque([0], 3)}, network


def within_an_object(network: Any, _options: dict[str, Any]) -> Any:
    prefix = network.inner.prefix
    before = prefix.keys.tolist(), [*prefix.layers[0]], len(network.inner.seen), float(network.inner.count)
    prefix.keys.add_(1)
    prefix.layers[0].append(1)
    network.inner.seen.add(len(before[1]))
    network.inner.count += 1
    return before


def within_a_tensor_by_the_name_of_a_cache(network: Any, _options: dict[str, Any]) -> Any:
    before = network.prefix_cache.tolist()
    network.prefix_cache.mul_(5)
    return before


def in_what_it_is_given(_network: Any, options: dict[str, Any]) -> Any:
    before = options["keys"].tolist(), torch.rand(1).item()
    options["keys"].mul_(2)
    return before


WRITTEN = (
    *(beside_in_a_dict, beside_in_a_nested_list, beside_in_an_object, in_the_easycache),
    *(within_the_network, within_an_object, within_a_tensor_by_the_name_of_a_cache, in_what_it_is_given),
)
WITHIN = (within_the_network, within_an_object, within_a_tensor_by_the_name_of_a_cache)


def network() -> Any:
    made: Any = torch.nn.Linear(2, 2)
    made.cache, made.prefix_cache = {}, torch.ones(2)
    made.inner = torch.nn.Module()
    made.inner.prefix, made.inner.seen = Prefix(made), set()
    made.inner.register_buffer("count", torch.zeros(()))
    return made


def options() -> dict[str, Any]:
    return {
        "cache": {},
        "nested": ({"layers": []},),
        "holder": SimpleNamespace(state=None),
        "easycache": SimpleNamespace(skipped=0),
        "keys": torch.ones(2),
    }


@pytest.mark.parametrize("write", WRITTEN)
def test_each_call_begins_with_what_was_remembered_before_the_first(write: Written) -> None:
    module, given = network(), options()
    memory = CallMemory(module, given, FP16)
    with memory.settled():
        reads = [write(module, memory.of_a_call({})) for _ in range(3)]
        memory.keep()
    assert reads == [reads[0]] * 3


@pytest.mark.parametrize("write", WRITTEN)
def test_what_the_one_call_that_counts_wrote_stays_beside_and_not_within_the_network(write: Written) -> None:
    module, given, read = network(), options(), []
    for _ in range(2):
        memory = CallMemory(module, given, FP16)
        with memory.settled():
            write(module, memory.of_a_call({}))  # the attempt
            read.append(write(module, memory.of_a_call({})))  # the rerun, which counts
            memory.keep()
    assert (read[0] == read[1]) is (write in WITHIN)
    assert not hasattr(module, "added")


@pytest.mark.parametrize("write", WRITTEN)
def test_a_call_that_raises_leaves_nothing(write: Written) -> None:
    module, given = network(), options()

    def fail() -> None:
        memory = CallMemory(module, given, FP16)
        with memory.settled():
            write(module, memory.of_a_call({}))
            raise RuntimeError

    fresh = network()
    torch.manual_seed(0)
    expected = write(fresh, options())
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        fail()
    assert write(module, given) == expected


@pytest.mark.parametrize(("value", "dtype"), [(3.0, FP16), (1e6, torch.float32)])
def test_a_rerun_leaves_half_precision_where_that_holds_it(value: float, dtype: torch.dtype) -> None:
    given = options()
    given["cache"]["known"] = known = torch.zeros(2)
    memory = CallMemory(network(), given, FP16)
    with memory.settled():
        memory.of_a_call({})["cache"]["keys"] = torch.full((2,), value)
        memory.keep()
    assert given["cache"]["keys"].dtype is dtype and given["cache"]["keys"][0] == value
    assert given["cache"]["known"] is known and known.dtype is torch.float32, "what was there stays as it was"


def test_where_no_call_counts_nothing_is_kept() -> None:
    given = options()
    memory = CallMemory(network(), given, FP16)
    with memory.settled():
        memory.of_a_call({})["easycache"].skipped = 5
        memory.keep()
        memory.forget()
        memory.of_a_call({"more": 1})
    assert given["easycache"].skipped == 0 and "more" not in given


@pytest.mark.parametrize("slots", [[None], [{}], [SimpleNamespace(pinned=[])], 3])
def test_a_cache_whose_slots_are_others_ends_no_run(slots: Any) -> None:
    module = network()
    module.prefix_cache = SimpleNamespace(slots=slots)
    memory = CallMemory(module, options(), FP16)
    with memory.settled():
        memory.of_a_call({})
        memory.keep()
