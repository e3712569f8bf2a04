"""Other packs' global variables: state of a call is put back, all else is left alone, and nothing raises."""

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
    return lambda it: setattr(it, name, value)


ONES = torch.ones(2)
PUT_BACK = {  # how a call changes a pack's variables; what tells that it was put back
    "a count": (set_("calls", 3), lambda it: it.calls == 0),
    "a share": (set_("share", 1), lambda it: it.share == 0.5),
    "a tensor": (set_("made", ONES), lambda it: it.made is None),
    "a new variable": (set_("last", ONES), lambda it: not hasattr(it, "last")),
    "a class's": (lambda it: setattr(it.Kept, "made", ONES), lambda it: it.Kept.made is None),
    "a class's new one": (lambda it: setattr(it.Kept, "last", ONES), lambda it: not hasattr(it.Kept, "last")),
    "in an object": (lambda it: vars(it.kept).update(hits=2, cache={1: ONES}), lambda it: vars(it.kept)["hits"] == 0),
    "in an object's dict": (lambda it: it.kept.cache.update({1: ONES}), lambda it: it.kept.cache == {}),
    "in a dict": (lambda it: it.cache.update(last=ONES, more=1), lambda it: [*it.cache] == ["last", "order"]),
    "in place": (lambda it: it.cache["last"].fill_(torch.nan), lambda it: bool((it.cache["last"] == 1).all())),
    "a tensor that is dropped": (lambda it: it.cache.clear(), lambda it: [*it.cache] == ["last", "order"]),
    "behind a large table": (lambda it: it.after["last"].fill_(3), lambda it: bool((it.after["last"] == 1).all())),
    "beside what is not copied": (lambda it: it.mixed["last"].fill_(3), lambda it: bool((it.mixed["last"] == 1).all())),
    "in a set": (lambda it: it.mixed["steps"].add(2), lambda it: it.mixed["steps"] == {1}),
    "in what holds itself": (lambda it: it.mixed["itself"].append(ONES), lambda it: len(it.mixed["itself"]) == 1),
    "beside a tensor": (lambda it: it.cache["order"].append(3), lambda it: it.cache["order"] == [1, 2]),
}
LEFT_ALONE = {  # by the variable
    "a flag": (set_("flag", True), lambda it: it.flag is True),
    "what a first call sets up": (lambda it: it.models.update(gain=1.5), lambda it: it.models == {"gain": 1.5}),
    "a name that holds a tensor now": (set_("file", ONES), lambda it: it.file is ONES),
    "what holds too much": (lambda it: it.table.update(last=ONES), lambda it: "last" in it.table),
    "a module's own": (lambda it: setattr(it.block, "last", ONES), lambda it: it.block.last is ONES),
    "a queue": (lambda it: it.queue.append(2), lambda it: it.queue == [1, 2]),
    "a model": (lambda it: it.models.update(a=nn.Linear(1, 1)), lambda it: [*it.models] == ["a"]),
    "a function": (set_("patched", lambda: 1), lambda it: hasattr(it, "patched")),
    "what was loaded": (set_("made", "a name"), lambda it: it.made == "a name"),
    "what cannot be set": (lambda it: type.__setattr__(it.Strict, "made", ONES), lambda it: it.Strict.made is ONES),
}


@pytest.mark.parametrize(("change", "is_so"), [*PUT_BACK.values(), *LEFT_ALONE.values()], ids=[*PUT_BACK, *LEFT_ALONE])
def test_what_a_call_keeps_is_put_back_and_what_others_keep_is_not(change: Any, is_so: Any) -> None:
    it = pack()
    variables = PackVariables([it])
    change(it)
    variables.restore()
    assert is_so(it)


@pytest.mark.parametrize(("dtypes", "otherwise"), [({}, torch.float16), ({}, None), ("float32", torch.float16)])
def test_what_a_rerun_leaves_is_narrowed_where_half_precision_left_it_so(dtypes: Any, otherwise: Any) -> None:
    it = pack()
    before = PackVariables([it])
    it.made, it.Kept.made, it.cache["new"] = torch.ones(2), torch.ones(2), [torch.ones(2), torch.full((2,), 1e6)]
    it.cache["one"] = torch.ones(2)
    known = before.dtypes_now() if dtypes else {}
    PackVariables([it]).narrow(known, otherwise, before.tensors)
    expected = torch.float16 if otherwise and not dtypes else torch.float32
    assert {it.made.dtype, it.Kept.made.dtype, it.cache["new"][0].dtype, it.cache["one"].dtype} == {expected}
    assert it.cache["new"][1].dtype is it.cache["last"].dtype is torch.float32, "beyond fp16, and there before"


@pytest.mark.parametrize(
    ("file", "is_one"),
    [
        ("ComfyUI/custom_nodes/a_pack/nodes.py", True),
        ("lib/site-packages/comfyui/custom_nodes/a_pack.py", True),
        ("lib/site-packages/torch/nn.py", False),
        ("builds/torch/nn.py", False),
        ("ComfyUI/comfy_extras/nodes_sag.py", False),
        (None, False),
    ],
)
def test_what_lies_with_comfyuis_packs_is_a_pack(file: Any, is_one: bool) -> None:
    it = pack(file)
    network = nn.Sequential(nn.Linear(1, 1), it.Block())
    assert modules_of_packs(network, [it.Hostile(), print, lambda: 1]) == [it] * is_one
