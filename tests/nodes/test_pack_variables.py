"""Other packs' global variables: state of a call is restored, all else stays, and nothing raises."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.pack_variables import PackVariables, modules_of_packs
from torch import nn

PACK = """
class Kept:
    made = None
    def __init__(self): self.cache, self.hits = {}, 0

class Hostile:
    def __getattribute__(self, name): raise RuntimeError(name)

class Forbids(type):
    def __setattr__(self, name, value): raise TypeError(name)

class Strict(metaclass=Forbids):
    made = None

class Named(dict):
    def __getitem__(self, key): raise KeyError(key)

class Block(nn.Module):
    pass

kept, hostile, types, named = Kept(), [Hostile()], {"sizes": list[int]}, Named(a=1)
calls, share, made, flag, queue, models, frozen = 0, 0.5, None, False, [1], {}, (1, [2])
cache = {"last": ones(2), "order": [1, 2]}
table, after, block, file = dict.fromkeys(range(6000)), {"last": ones(2)}, Block(), "a name"
mixed = {"last": ones(2), "sparse": ones(2).to_sparse(), "nowhere": ones(2, device="meta"), "steps": {1}}
mixed["itself"] = [mixed]
sparse, nowhere = ones(2).to_sparse(), ones(2, device="meta")
"""


def pack(file: str = "ComfyUI/custom_nodes/a_pack/nodes.py") -> Any:
    made: Any = ModuleType("a_pack.nodes")
    made.__file__, made.nn, made.ones = file, nn, torch.ones
    exec(PACK, vars(made))
    sys.modules["a_pack.nodes"] = made
    return made


def set_(name: str, value: Any) -> Any:
    return lambda m: setattr(m, name, value)


ONES = torch.ones(2)
RESTORED = {  # (a change of a pack's variables by a call, a check that it was restored)
    "a count": (set_("calls", 3), lambda m: m.calls == 0),
    "a share": (set_("share", 1), lambda m: m.share == 0.5),
    "a tensor": (set_("made", ONES), lambda m: m.made is None),
    "a new variable": (set_("last", ONES), lambda m: not hasattr(m, "last")),
    "a class variable": (lambda m: setattr(m.Kept, "made", ONES), lambda m: m.Kept.made is None),
    "a new class variable": (lambda m: setattr(m.Kept, "last", ONES), lambda m: not hasattr(m.Kept, "last")),
    "an object": (lambda m: vars(m.kept).update(hits=2, cache={1: ONES}), lambda m: vars(m.kept)["hits"] == 0),
    "a dict of an object": (lambda m: m.kept.cache.update({1: ONES}), lambda m: m.kept.cache == {}),
    "a dict": (lambda m: m.cache.update(last=ONES, more=1), lambda m: [*m.cache] == ["last", "order"]),
    "a tensor in place": (lambda m: m.cache["last"].fill_(torch.nan), lambda m: bool((m.cache["last"] == 1).all())),
    "a dropped tensor": (lambda m: m.cache.clear(), lambda m: [*m.cache] == ["last", "order"]),
    "after a large table": (lambda m: m.after["last"].fill_(3), lambda m: bool((m.after["last"] == 1).all())),
    "beside uncopied tensors": (lambda m: m.mixed["last"].fill_(3), lambda m: bool((m.mixed["last"] == 1).all())),
    "a set": (lambda m: m.mixed["steps"].add(2), lambda m: m.mixed["steps"] == {1}),
    "a list in a cycle": (lambda m: m.mixed["itself"].append(ONES), lambda m: len(m.mixed["itself"]) == 1),
    "a list beside a tensor": (lambda m: m.cache["order"].append(3), lambda m: m.cache["order"] == [1, 2]),
}
UNCHANGED = {  # (a change, a check that it stayed)
    "a flag": (set_("flag", True), lambda m: m.flag is True),
    "a setting of a first call": (lambda m: m.models.update(gain=1.5), lambda m: m.models == {"gain": 1.5}),
    "a name that becomes a tensor": (set_("file", ONES), lambda m: m.file is ONES),
    "a too large table": (lambda m: m.table.update(last=ONES), lambda m: "last" in m.table),
    "an attribute of a module": (lambda m: setattr(m.block, "last", ONES), lambda m: m.block.last is ONES),
    "a queue": (lambda m: m.queue.append(2), lambda m: m.queue == [1, 2]),
    "a model": (lambda m: m.models.update(a=nn.Linear(1, 1)), lambda m: [*m.models] == ["a"]),
    "a function": (set_("patched", lambda: 1), lambda m: hasattr(m, "patched")),
    "a loaded name": (set_("made", "a name"), lambda m: m.made == "a name"),
    "a read-only variable": (lambda m: type.__setattr__(m.Strict, "made", ONES), lambda m: m.Strict.made is ONES),
}


@pytest.mark.parametrize(("change", "check"), [*RESTORED.values(), *UNCHANGED.values()], ids=[*RESTORED, *UNCHANGED])
def test_state_of_call_is_restored_and_other_changes_stay(change: Any, check: Any) -> None:
    m = pack()
    variables = PackVariables([m])
    change(m)
    variables.restore()
    assert check(m)


@pytest.mark.parametrize(("dtypes", "default"), [({}, torch.float16), ({}, None), ("float32", torch.float16)])
def test_rerun_tensors_are_narrowed_to_dtypes_of_half_precision_call(dtypes: Any, default: Any) -> None:
    m = pack()
    before = PackVariables([m])
    m.made, m.Kept.made, m.cache["new"] = torch.ones(2), torch.ones(2), [torch.ones(2), torch.full((2,), 1e6)]
    m.cache["one"] = torch.ones(2)
    known = before.dtypes_now() if dtypes else {}
    PackVariables([m]).narrow(known, default, before.tensors)
    expected = torch.float16 if default and not dtypes else torch.float32
    assert {m.made.dtype, m.Kept.made.dtype, m.cache["new"][0].dtype, m.cache["one"].dtype} == {expected}
    assert m.cache["new"][1].dtype is m.cache["last"].dtype is torch.float32, "beyond fp16, and from before the call"


@pytest.mark.parametrize(
    ("file", "is_pack"),
    [
        ("ComfyUI/custom_nodes/a_pack/nodes.py", True),
        ("lib/site-packages/comfyui/custom_nodes/a_pack.py", True),
        ("lib/site-packages/torch/nn.py", False),
        ("builds/torch/nn.py", False),
        ("ComfyUI/comfy_extras/nodes_sag.py", False),
        (None, False),
    ],
)
def test_modules_in_custom_nodes_folder_are_packs(file: Any, is_pack: bool) -> None:
    m = pack(file)
    network = nn.Sequential(nn.Linear(1, 1), m.Block())
    assert modules_of_packs(network, [m.Hostile(), print, lambda: 1]) == [m] * is_pack
