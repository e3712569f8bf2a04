"""Guard every workflow: where guards are inserted in a prompt, and whether any are."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import every_workflow, host
from comfyui_onediff_guard.comfyui_host.black_output import problem_of
from comfyui_onediff_guard.comfyui_host.guarded_prompt import computes, with_guards
from comfyui_onediff_guard.comfyui_host.runs import Run, Settings
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped


class AnyType(str):
    """As packs define it: a string that equals every other string."""

    def __ne__(self, _other: object) -> bool:
        return False


def node_class(*outputs: Any, **inputs: str) -> type:
    types = {"required": {name: (kind,) for name, kind in inputs.items()}}
    return type("Node", (), {"RETURN_TYPES": outputs, "INPUT_TYPES": classmethod(lambda _: types)})


CLASSES = {
    "Checkpoint": node_class("MODEL", "CLIP", "VAE"),
    "Lora": node_class("MODEL", "CLIP", model="MODEL"),
    "Sampler": node_class("LATENT", model="MODEL", latent="LATENT"),
    "Decode": node_class("IMAGE", vae="VAE", samples="LATENT"),
    "Encode": node_class("LATENT", vae="VAE"),
    "AllInOne": node_class("MODEL", "LATENT", "IMAGE", "VAE", model="MODEL", vae="VAE"),
    "Save": node_class(model="MODEL"),
    "Schedule": node_class("SIGMAS", model="MODEL"),
    "Train": node_class("LORA_MODEL", "LOSS_MAP", "INT", model="MODEL"),
    "Guider": node_class("GUIDER", model="MODEL"),
    "Reroute": node_class("*", value="*"),
    "Switch": node_class(AnyType("*"), first="*"),
    "Matched": node_class("COMFY_MATCHTYPE_V3", value="COMFY_MATCHTYPE_V3"),
    "Choice": node_class(["a", "b"], "MODEL"),
    "Nothing": type("Nothing", (), {}),
    "OneDiffGuardNaNGuardNative": node_class("MODEL", "VAE", model="MODEL", vae="VAE"),
    "OneDiffGuardNumericsProbeModel": node_class("IMAGE", "STRING", model="MODEL"),
}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


LOADED = {"1": node("Checkpoint")}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {  # a prompt, and the inputs that are guarded, "id.name"
    "sampler and decoder": (
        {**LOADED, "2": node("Sampler", model=["1", 0]), "3": node("Decode", vae=["1", 2], samples=["2", 0])},
        ["2.model", "3.vae"],
    ),
    "after a LoRA": ({**LOADED, "2": node("Lora", model=["1", 0]), "3": node("Sampler", model=["2", 0])}, ["3.model"]),
    "an all-in-one sampler": ({**LOADED, "2": node("AllInOne", model=["1", 0], vae=["1", 2])}, ["2.model", "2.vae"]),
    "behind reroutes": (
        {
            **LOADED,
            "2": node("Reroute", value=["1", 0]),
            "3": node("Matched", value=["2", 0]),
            "4": node("Switch", first=["3", 0]),
            "5": node("Sampler", model=["4", 0]),
        },
        ["5.model"],
    ),
    "a guider": ({**LOADED, "2": node("Guider", model=["1", 0])}, ["2.model"]),
    "after a drop-down": ({"1": node("Choice"), "2": node("Sampler", model=["1", 1])}, ["2.model"]),
    "in a subgraph": ({"5:1": node("Checkpoint"), "5:2": node("Encode", vae=["5:1", 2])}, ["5:2.vae"]),
    "saved, scheduled, trained": (
        {**LOADED, **{str(2 + i): node(kind, model=["1", 0]) for i, kind in enumerate(("Save", "Schedule", "Train"))}},
        [],
    ),
    "guarded by hand": (
        {**LOADED, "2": node("OneDiffGuardNaNGuardNative", model=["1", 0]), "3": node("Sampler", model=["2", 0])},
        [],
    ),
    "our own probe": ({**LOADED, "2": node("OneDiffGuardNumericsProbeModel", model=["1", 0])}, []),
    "a link to nowhere": ({"2": node("Sampler", model=["1", 0])}, []),
    "a slot out of range": (
        {**LOADED, "2": node("Sampler", model=["1", 3]), "3": node("Sampler", model=["1", -1])},
        [],
    ),
    "unknown classes": (
        {"1": node("Unknown"), "2": node("Sampler", model=["1", 0]), "3": node("Other", x=["1", 0])},
        [],
    ),
    "no outputs": ({"1": node("Nothing"), "2": node("Sampler", model=["1", 0])}, []),
    "values that are no links": (
        {
            **LOADED,
            "2": node("Sampler", model=[1, 0], latent=["1"]),
            "3": node("Sampler", model=["1", True], latent=None),
        },
        [],
    ),
    "another type than the input's": (
        {**LOADED, "2": node("Reroute", value=["1", 1]), "3": node("Sampler", x=["2", 0])},
        [],
    ),
    "no nodes at all": (
        {"1": None, "2": [], "3": {"class_type": []}, "4": {"class_type": "Sampler", "inputs": []}},
        [],
    ),
    "a circle": ({"1": node("Lora", model=["2", 0]), "2": node("Lora", model=["1", 0])}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_guards_are_inserted_where_model_or_vae_is_used(name: str) -> None:
    prompt, expected = CASES[name]
    before = copy.deepcopy(prompt)
    made, count = with_guards(prompt, CLASSES, "auto")
    assert prompt == before, "the prompt that was queued is not changed"
    moved = {}
    for id_, was in prompt.items():
        for name_, value in (was["inputs"] if made[id_] != was else {}).items():
            if (now := made[id_]["inputs"][name_]) != value:
                moved[f"{id_}.{name_}"] = value, made[now[0]]
                assert ["model", "vae"][now[1]] in made[now[0]]["inputs"] and ":" not in now[0]
    assert list(moved) == expected and count == len(made) - len(prompt) == len(expected)
    for source, guard in moved.values():
        assert source in guard["inputs"].values()
        assert guard["inputs"]["precision"] == "auto"
        assert guard["class_type"] == "OneDiffGuardNaNGuardNative"


def test_one_guard_serves_all_uses_of_an_output() -> None:
    prompt = {**LOADED, **{str(n): node("Sampler", model=["1", 0]) for n in range(2, 9)}, "onediff_guard_1_0": None}
    made, count = with_guards(prompt, CLASSES)
    assert count == 1 and made["onediff_guard_1_0"] is None
    assert {tuple(made[str(n)]["inputs"]["model"]) for n in range(2, 9)} == {("onediff_guard_1_0_", 0)}


def test_each_guard_has_its_own_id() -> None:
    any_output = {"1": node("Reroute", value=["9", 0]), "2": node("AllInOne", model=["1", 0], vae=["1", 0])}
    much_alike = {"5:1": node("Checkpoint"), "5_1": node("Checkpoint"), "6": node("AllInOne", model=["5:1", 0])}
    much_alike |= {"7": node("AllInOne", model=["5_1", 0]), "onediff_guard_5_1_0_": node("Nothing")}
    for prompt in (any_output, much_alike):
        made, count = with_guards(prompt, CLASSES)
        assert count == 2 and len(made) == len(prompt) + 2


ON = {"OneDiffGuard.EveryWorkflow": True}
WISHES: list[tuple[Any, str, dict[str, Any], str]] = [  # extra_data.onediff_guard, variable, settings, result
    (None, "", {}, ""),
    (None, "", ON, "inherit"),
    (None, "", {"OneDiffGuard.EveryWorkflow": "yes please"}, ""),
    (None, "", {**ON, "OneDiffGuard.FastFp16": True}, "auto"),
    (None, "", {"OneDiffGuard.FastFp16": True}, ""),
    (None, "1", {}, "inherit"),
    (None, "auto", {}, "auto"),
    (None, "on", {"OneDiffGuard.FastFp16": True}, "auto"),
    (None, "0", ON, ""),
    (False, "1", ON, ""),
    (True, "0", {}, "inherit"),
    ("auto", "", {}, "auto"),
    ("inherit", "", {**ON, "OneDiffGuard.FastFp16": True}, "inherit"),
    ([], "", ON, ""),
    ({"a": 1}, "", ON, ""),
]


@pytest.mark.parametrize(("requested", "variable", "settings", "expected"), WISHES)
def test_prompt_overrides_variable_and_variable_overrides_setting(
    requested: Any, variable: str, settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(every_workflow.VARIABLE, variable)
    monkeypatch.setattr(every_workflow, "settings_of", lambda _user: settings)
    extra = {} if requested is None else {"onediff_guard": requested}
    assert every_workflow.wanted({"prompt": {}, "extra_data": extra}) == expected


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's folder of users."""
    folder_paths = SimpleNamespace(get_user_directory=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths)  # pyright: ignore[reportArgumentType]
    for user, settings in {"default": json.dumps(ON), "anna": '{"OneDiffGuard.EveryWorkflow": false}'}.items():
        (tmp_path / user).mkdir()
        (tmp_path / user / "comfy.settings.json").write_text(settings, encoding="utf-8")
    return tmp_path


def test_each_user_has_their_own_settings(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(every_workflow.VARIABLE, raising=False)
    found = {}
    for user in ("default", "anna", "somebody new"):
        token = every_workflow._user.set(user)
        found[user] = every_workflow.wanted({})
        every_workflow._user.reset(token)
    assert found == {"default": "inherit", "anna": "", "somebody new": ""}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"OneDiffGuard.EveryWorkflow": ', "\udcff"])
def test_unreadable_settings_mean_off(users: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(every_workflow.VARIABLE, raising=False)
    (users / "default" / "comfy.settings.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert every_workflow.wanted({}) == ""


X = torch.full((1, 8, 8, 3), 0.5)
OUTPUTS: list[tuple[str, Any, str]] = [  # a slot's type, its content, and the problem with it
    ("IMAGE", [X], ""),
    ("IMAGE", [X, X * torch.nan], "non-finite"),
    ("IMAGE", [X - X], "black"),
    ("IMAGE", [X * 1e37], ""),  # its sum overflows
    ("IMAGE", [torch.cat([X, X * torch.inf, -X * torch.inf])], "non-finite"),
    ("IMAGE", [torch.cat([X, -X])], ""),  # its sum is 0
    ("IMAGE", [(X * 6e4).half()], ""),
    ("IMAGE", [X[:0]], ""),
    ("IMAGE", [None], ""),
    ("IMAGE", None, ""),
    ("LATENT", [{"samples": X - X}], ""),  # an empty one
    ("LATENT", [{"samples": X * torch.nan}], "non-finite"),
    ("LATENT", [{"samples": torch.nested.nested_tensor([X, X * torch.nan])}], ""),
    ("LATENT", [{}], ""),
    ("MASK", [X[..., 0] - X[..., 0]], ""),
    ("MODEL", [torch.nn.Linear(2, 2)], ""),
]


@pytest.mark.parametrize(("kind", "slot", "problem"), OUTPUTS)
def test_problem_of_each_output_is_found(kind: str, slot: Any, problem: str) -> None:
    assert problem_of([["text"], slot], ["STRING", kind]) == problem
    assert problem_of([slot], [kind, "IMAGE"]) == problem


@pytest.mark.parametrize(
    ("class_type", "computed"),
    [("Sampler", True), ("Decode", True), ("Lora", False), ("Save", False), ("Nothing", False), ("Unknown", False)],
)
def test_only_nodes_that_compute_with_model_or_vae_are_checked(class_type: str, computed: bool) -> None:
    assert computes(CLASSES.get(class_type)) is computed


@pytest.mark.parametrize(
    "data",
    [None, [], "prompt", {}, {"prompt": None}, {"prompt": []}, {"prompt": {}, "extra_data": []}, {"extra_data": 1}],
)
def test_invalid_prompt_is_passed_on_unchanged(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(every_workflow.VARIABLE, "1")
    assert every_workflow.on_prompt(data) is data


def test_own_error_leaves_prompt_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(every_workflow.VARIABLE, "1")
    monkeypatch.setattr(every_workflow.host, "node_classes", raising(RuntimeError("no classes")))
    data = {"prompt": LOADED}
    assert every_workflow.on_prompt(data) is data


def run_of(*, inserted: bool = True) -> Run:
    return Run(Settings(GuardPolicy(), inserted=inserted), steps=1)


def raising(error: Exception) -> Callable[[], Any]:
    return Mock(side_effect=error)


def test_each_prompt_in_history_has_summaries_of_its_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One guard serves them all: ComfyUI caches it."""
    server = SimpleNamespace(client_id=None, prompt_queue=SimpleNamespace(currently_running={}))
    monkeypatch.setattr(host, "server", lambda: server)
    settings = Settings(GuardPolicy(), inserted=True)
    summaries = dict[str, Any]()
    for prompt_id in ("first", "second", "of a guard that was wired"):
        server.last_prompt_id, extra = prompt_id, {"client_id": "page"}
        server.prompt_queue.currently_running = {7: (0, prompt_id, {}, extra, [])}
        for _ in range(2):
            run = Run(replace(settings, inserted="wired" not in prompt_id), steps=1)
            run._given_up = f"of the {prompt_id}"
            run.end()
        summaries[prompt_id] = extra.get("onediff_guard_summaries")
    assert summaries == {
        "first": ["of the first"] * 2,
        "second": ["of the second"] * 2,
        "of a guard that was wired": None,
    }


def test_summaries_are_removed_from_prompt_taken_from_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_workflow, "settings_of", lambda _user: {})
    data = {"prompt": {}, "extra_data": {"onediff_guard_summaries": ["of then"], "extra_pnginfo": {}}}
    assert every_workflow.on_prompt(data) == {"prompt": {}, "extra_data": {"extra_pnginfo": {}}}


def test_run_continues_unguarded_after_error_in_inserted_guard(caplog: pytest.LogCaptureFixture) -> None:
    run, calls = run_of(), []
    assert run.or_plain(raising(TypeError("of ours")), lambda: "plain") == "plain"
    assert run.or_plain(lambda: calls.append("guarded"), lambda: "plain again") == "plain again" and not calls
    run.end()
    assert "Not guarded from call 1 on: TypeError: of ours" in caplog.text


def test_error_of_comfyui_itself_is_raised_as_without_guard() -> None:
    run = run_of()
    with pytest.raises(ValueError, match="a wrong LoRA"):
        run.or_plain(raising(ValueError("seen under the guard")), raising(ValueError("a wrong LoRA")))
    assert not run._given_up


@pytest.mark.parametrize(("error", "inserted"), [(host.Interrupted("stop"), True), (TypeError("ours"), False)])
def test_interrupt_or_error_of_wired_guard_ends_run(error: Exception, inserted: bool) -> None:
    with pytest.raises(type(error)):
        run_of(inserted=inserted).or_plain(raising(error), lambda: "plain")


def test_first_out_of_memory_is_raised_so_that_comfyui_uses_tiles() -> None:
    run = run_of()
    run.retried = True
    with pytest.raises(torch.OutOfMemoryError):
        run.or_plain(raising(torch.OutOfMemoryError("whole")), lambda: "plain")
    assert run.or_plain(lambda: "a tile", lambda: "plain") == "a tile", "tiles are guarded"
    assert run.or_plain(raising(torch.OutOfMemoryError("a tile")), lambda: "plain") == "plain"


def test_state_that_cannot_be_restored_gives_broken_result() -> None:
    error = GuardStopped("overwritten")
    error.lost = "ar_state"  # pyright: ignore[reportAttributeAccessIssue]
    assert run_of().or_plain(raising(error), lambda: "plain", lambda: "broken") == "broken"
