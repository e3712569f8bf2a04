"""CallMemory: a repeated call starts from the state before it, in the network and in its caches; without ComfyUI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.model_calls import CallMemory

FP16 = torch.float16
Write = Callable[[Any, dict[str, Any]], Any]  # (network, options) → the state that a call reads before it writes


def in_option_dict(_network: Any, options: dict[str, Any]) -> Any:
    before = dict(options["cache"])
    options["cache"]["keys"] = options["cache"].get("keys", 0) + 1
    return before


def in_option_nested_list(_network: Any, options: dict[str, Any]) -> Any:
    before = [*options["nested"][0]["layers"]]
    options["nested"][0]["layers"].append(1)
    return before


def in_option_object(_network: Any, options: dict[str, Any]) -> Any:
    before = options["holder"].state
    options["holder"].state = 1 if before is None else before + 1
    return before


def in_easycache(_network: Any, options: dict[str, Any]) -> Any:
    before = options["easycache"].skipped
    options["easycache"].skipped = before + 1
    return before


def in_network(network: Any, _options: dict[str, Any]) -> Any:
    before = dict(network.cache)
    network.cache["keys"] = len(before) + 1
    network.added = True
    return before


class Prefix:
    """Keys of a prompt's prefix, as Qwen-Image 2.1 keeps them in an object on its network."""

    __slots__ = ("keys", "layers", "network")

    def __init__(self, network: Any):
        self.keys, self.layers, self.network = torch.zeros(2), {0: deque([0], 3)}, network


def in_network_object(network: Any, _options: dict[str, Any]) -> Any:
    prefix = network.inner.prefix
    before = prefix.keys.tolist(), [*prefix.layers[0]], len(network.inner.seen), float(network.inner.count)
    prefix.keys.add_(1)
    prefix.layers[0].append(1)
    network.inner.seen.add(len(before[1]))
    network.inner.count += 1
    return before


def in_network_cache_tensor(network: Any, _options: dict[str, Any]) -> Any:
    before = network.prefix_cache.tolist()
    network.prefix_cache.mul_(5)
    return before


def in_input_tensor(_network: Any, options: dict[str, Any]) -> Any:
    before = options["keys"].tolist(), torch.rand(1).item()
    options["keys"].mul_(2)
    return before


WRITES = (
    *(in_option_dict, in_option_nested_list, in_option_object, in_easycache),
    *(in_network, in_network_object, in_network_cache_tensor, in_input_tensor),
)
NETWORK_WRITES = (in_network, in_network_object, in_network_cache_tensor)


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


@pytest.mark.parametrize("write", WRITES)
def test_each_call_starts_from_state_before_first_call(write: Write) -> None:
    module, inputs = network(), options()
    memory = CallMemory(module, inputs, FP16)
    with memory.settled():
        reads = [write(module, memory.of_a_call({})) for _ in range(3)]
        memory.keep()
    assert reads == [reads[0]] * 3


@pytest.mark.parametrize("write", WRITES)
def test_kept_call_changes_state_of_options_but_not_of_network(write: Write) -> None:
    module, inputs, read = network(), options(), []
    for _ in range(2):
        memory = CallMemory(module, inputs, FP16)
        with memory.settled():
            write(module, memory.of_a_call({}))  # the attempt
            read.append(write(module, memory.of_a_call({})))  # the rerun, which is kept
            memory.keep()
    assert (read[0] == read[1]) is (write in NETWORK_WRITES)
    assert not hasattr(module, "added")


@pytest.mark.parametrize("write", WRITES)
def test_failed_call_leaves_no_state(write: Write) -> None:
    module, inputs = network(), options()

    def fail() -> None:
        memory = CallMemory(module, inputs, FP16)
        with memory.settled():
            write(module, memory.of_a_call({}))
            raise RuntimeError

    fresh = network()
    torch.manual_seed(0)
    expected = write(fresh, options())
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        fail()
    assert write(module, inputs) == expected


@pytest.mark.parametrize(("value", "dtype"), [(3.0, FP16), (1e6, torch.float32)])
def test_kept_values_are_cast_to_fp16_if_they_fit(value: float, dtype: torch.dtype) -> None:
    inputs = options()
    inputs["cache"]["known"] = known = torch.zeros(2)
    memory = CallMemory(network(), inputs, FP16)
    with memory.settled():
        memory.of_a_call({})["cache"]["keys"] = torch.full((2,), value)
        memory.keep()
    assert inputs["cache"]["keys"].dtype is dtype and inputs["cache"]["keys"][0] == value
    assert inputs["cache"]["known"] is known and known.dtype is torch.float32, "existing values stay as they were"


def test_forgotten_calls_leave_no_state() -> None:
    inputs = options()
    memory = CallMemory(network(), inputs, FP16)
    with memory.settled():
        memory.of_a_call({})["easycache"].skipped = 5
        memory.keep()
        memory.forget()
        memory.of_a_call({"more": 1})
    assert inputs["easycache"].skipped == 0 and "more" not in inputs


@pytest.mark.parametrize("slots", [[None], [{}], [SimpleNamespace(pinned=[])], 3])
def test_unknown_cache_slots_do_not_end_run(slots: Any) -> None:
    module = network()
    module.prefix_cache = SimpleNamespace(slots=slots)
    memory = CallMemory(module, options(), FP16)
    with memory.settled():
        memory.of_a_call({})
        memory.keep()
