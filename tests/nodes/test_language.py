"""What the program says, in the language of ComfyUI's page; and in English everywhere else."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import messages
import pytest
from comfyui_onediff_guard.comfyui_host import host, language
from comfyui_onediff_guard.comfyui_host.runs import Settings, guarded_run
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.pipelines.errors import BadSize, HubError
from comfyui_onediff_guard.pipelines.families.table import FAMILIES
from comfyui_onediff_guard.pipelines.pace import in_words
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, named
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped
from comfyui_onediff_guard.precision.overrides import (
    ALL_LAYERS_SCALED,
)
from comfyui_onediff_guard.precision.policy import Component, PlanImpossible, Precision, Variant, choose
from comfyui_onediff_guard.precision.report import Rerun, RunReport, StepRecord
from comfyui_onediff_guard.trust.message import BadInput, Message, joined, message_of

Choose = Callable[[object], None]
GUARD = NODE_CLASS_MAPPINGS["OneDiffGuardNaNGuardNative"]
_, COGVIDEOX_5B, *_ = FAMILIES["CogVideoXPipeline"].variants
WIRE = " Wire a model, a VAE or both through it."
NOTHING_WIRED = f"Nothing is wired to NaN Guard (native).{WIRE}"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Have this process look like a ComfyUI, whose page is set to a language."""
    settings = tmp_path / "default" / "comfy.settings.json"
    settings.parent.mkdir()
    seconds = count(1)
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_user_directory=lambda: str(tmp_path)))

    def choose(chosen: object) -> None:
        settings.write_text(json.dumps({"Comfy.Locale": chosen}))
        os.utime(settings, (0, next(seconds)))

    return choose


@pytest.mark.parametrize("language_", messages.LANGUAGES)
def test_everything_that_is_said_has_a_translation(language_: str) -> None:
    """Else: `python scripts/messages.py`, and fill in what is empty."""
    catalogue = messages.catalogue(language_)
    assert set(catalogue) == messages.templates() and not messages.made_at_run_time()
    for template, translation in catalogue.items():
        assert translation and sorted(re.findall(r"\{\d\}", translation)) == sorted(re.findall(r"\{\d\}", template))


@pytest.mark.parametrize(
    ("chosen", "begins"),
    [
        ("zh", f"“NaN 守护（原生）”没有任何连接。{WIRE}"),
        ("ru", f"К узлу «Защита от NaN (встроенные модели)» ничего не подключено.{WIRE}"),
        ("en", NOTHING_WIRED),
        ("fr", NOTHING_WIRED),
        ("../zh", NOTHING_WIRED),
        (3, NOTHING_WIRED),
        (None, NOTHING_WIRED),
    ],
)
def test_an_error_of_a_node_begins_in_the_language_of_the_page(page: Choose, chosen: object, begins: str) -> None:
    page(chosen)
    with pytest.raises(BadInput) as caught:
        GUARD().apply()
    assert str(caught.value) == begins


def test_without_comfyui_everything_is_english() -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(NOTHING_WIRED)}$"):
        GUARD().apply()
    assert (
        language.page_language() == ""
        and language.translated("1 step, 1 recomputed in fp32") == "1 step, 1 recomputed in fp32"
    )


@pytest.mark.parametrize("settings", ["", "[]", "{", '{"Comfy.Locale": {}}'])
def test_settings_that_cannot_be_used_are_english(page: Choose, tmp_path: Path, settings: str) -> None:
    (tmp_path / "default" / "comfy.settings.json").write_text(settings)
    assert language.page_language() == ""


def test_what_the_page_takes_holds_where_nobody_chose(page: Choose, tmp_path: Path) -> None:
    file = tmp_path / "default" / "comfy.settings.json"
    file.write_text(json.dumps({"OneDiffGuard.Language": "ru"}))
    assert language.page_language() == "ru"
    page("zh")
    assert language.page_language() == "zh"


def test_another_choice_holds_from_then_on(page: Choose) -> None:
    said = []
    for chosen in ("zh", "ru", "en"):
        page(chosen)
        at, reruns = Message("step {}/{}", 3, 50), Message("{} recomputed in fp32", 2)
        said.append(language.translated(joined(" · ", (at, "fp16", reruns, in_words(180)))))
    assert said == [
        "第 3/50 步 · fp16 · 用 fp32 重算 2 次 · 还需 3 分钟",
        "шаг 3/50 · fp16 · пересчитано в fp32: 2 · осталось 3 мин",
        "step 3/50 · fp16 · 2 recomputed in fp32 · 3 min left",
    ]


STEP = StepRecord("denoiser", 0, None, "bf16", "finite", 0.1, 1.0)
RERUN = Rerun("blocks.7.ff", 9e4, Message("{} from here on", ALL_LAYERS_SCALED), 0.1, None)


def _report(variant: Variant, architecture: str, component: Component, *steps: StepRecord) -> RunReport:
    plan = choose(named(architecture), variant, component, Precision.AUTO)
    return RunReport(variant.name, architecture, plan, steps=list(steps))


def _refused(**sizes: int) -> str:
    with pytest.raises(BadSize) as caught:
        FAMILIES["CogVideoXPipeline"].sizes.check(**sizes)
    return message_of(caught.value)


@pytest.mark.parametrize(
    ("said", "chinese"),
    [
        (
            lambda: _report(COGVIDEOX_5B, "sm80", Component.DENOISER, STEP, replace(STEP, outcome="rerun")).summary(),
            "bf16，因为 CogVideoX-5B 用 bf16 训练，sm80 (Ampere) 可原生计算；2 步，其中 1 个用 fp32 重算。",
        ),
        (
            lambda: _report(
                COGVIDEOX_5B, "sm75", Component.DENOISER, replace(STEP, step=3, outcome="rerun", rerun=RERUN)
            ).finding(),
            "第 4 步：blocks.7.ff 中有值达到 90,000（fp16 止于 65,504）。 已用 fp32 重算；此后溢出保护。",
        ),
        (
            lambda: joined("\n", (Message("encoding prompt {} of {}", 1, 2), Message("decoding part {} of {}", 5, 32))),
            "编码提示词 1/2\n解码第 5/32 部分",
        ),
        (
            lambda: Message("the prompt is longer than {} tokens; this was cut off: {}", 226, "step 1; 1 rerun"),
            "提示词超过 226 个 token；截掉的是：step 1; 1 rerun",
        ),
        (lambda: _refused(width=100), "width 是 100，但必须是 16 的倍数，从 16 到 4096。 Nearest: 96."),
        (lambda: pickle.loads(pickle.dumps(Message("decoding part {} of {}", 1, 2))), "解码第 1/2 部分"),
        (lambda: copy.deepcopy(Message("decoding part {} of {}", 1, 2)), "解码第 1/2 部分"),
        (lambda: "nobody knows this, nor that.", "nobody knows this, nor that."),
        (lambda: Message("{}", "/models/a: b, {0}; d"), "/models/a: b, {0}; d"),
        (lambda: "decoding 1 of 2", "decoding 1 of 2"),  # other people's text
    ],
)
def test_a_line_is_put_together_of_parts(page: Choose, said: Callable[[], str], chinese: str) -> None:
    page("zh")
    assert language.translated(said()) == chinese


def test_a_message_is_the_text_that_format_makes() -> None:
    """As a string, in logs, for programs and without a page, it is English."""
    inner = Message("'{}' {:.1%}, {!r}", "{x}", 0.125, "a")
    said = Message("{} of {}", inner, BadInput("no {}", "{y}"))
    assert inner == "'{x}' 12.5%, 'a'" and str(said) == f"{said}" == "'{x}' 12.5%, 'a' of no {y}"
    assert (said.template, said.fields[1]) == ("{0} of {1}", "no {y}") and json.loads(json.dumps(said)) == said
    assert Message("a {b}") == "a {b}" and ("x" + Message("{}", 1) + "y") == "x1y" and str(BadInput("{")) == "{"


def test_every_reason_of_every_plan_is_translated(page: Choose) -> None:
    """No English word of three letters is left in it, apart from names."""

    page("zh")
    left = set[str]()
    for family in FAMILIES.values():
        for variant in family.variants:
            for architecture in map(named, ARCHITECTURES):
                for request in Precision:
                    try:
                        plan = choose(architecture, variant, Component.DENOISER, request)
                    except PlanImpossible:
                        continue
                    said = language.translated(plan.reason).replace(str(architecture), "").replace(variant.name, "")
                    left |= set(re.findall(r"\b[a-z]{3,}\b", said)) - {"plain", "auto"}
    assert not left


def test_errors_of_others_are_theirs(page: Choose) -> None:
    page("zh")
    with pytest.raises(ValueError, match=re.escape(NOTHING_WIRED)), language.speaking():
        raise ValueError(NOTHING_WIRED)
    with pytest.raises(HubError) as caught, language.speaking():
        raise HubError("'{}' is not a repository id; use owner/name. Make room.", "a")
    assert str(caught.value) == "“a”不是仓库 id；请写成 owner/name。 Make room."


def test_the_class_of_an_error_can_be_read_where_comfyui_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, shown in {"other": HubError.__module__, "execution": "OneDiffGuard"}.items():
        monkeypatch.setitem(sys.modules, module, sys)
        with pytest.raises(HubError) as caught, language.speaking(), language.speaking():
            raise HubError("'{}' is not a repository id; use owner/name.", "a")
        assert (caught.type.__module__, caught.type.__qualname__) == (shown, "HubError")


def test_errors_of_a_guard_of_comfyuis_own_models_too(page: Choose) -> None:
    page("zh")
    with pytest.raises(GuardStopped) as caught, guarded_run(Settings(GuardPolicy())):
        raise GuardStopped(
            "{}: the output in {} is {}, and the guard is set to stop. Set it to 'rerun'.",
            Message("Step {}", 4),
            "fp16",
            Message("NaN or infinite"),
        )
    assert str(caught.value) == "第 4 步：fp16 中的输出是 NaN 或无穷大，而守护设为 stop。 Set it to 'rerun'."


def test_what_a_node_shows_is_in_the_language_of_the_page(page: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(host, "server", lambda: SimpleNamespace(send_progress_text=lambda text, _: shown.append(text)))
    page("zh")
    host.say("5", joined(" ", (Message("decoding part {} of {}", 1, 2), "<b>")))
    host.say("5", "decoding 1 of 2", as_it_is=True)
    assert shown[1] == "decoding 1 of 2" and shown[0].startswith("解码第 1/2 部分")


def test_what_is_typed_wrong_is_refused_in_the_language_of_the_page(page: Choose) -> None:
    page("zh")
    answer = NODE_CLASS_MAPPINGS["OneDiffGuardNaNGuard"].VALIDATE_INPUTS("{")
    assert "不是可用的配置档" in answer
