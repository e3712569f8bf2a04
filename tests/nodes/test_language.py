"""Translation of messages into the language of ComfyUI's page; English everywhere else."""

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
from comfyui_onediff_guard.pipelines.time_left import in_words
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
WIRE = " Connect a model, a VAE or both."
NOTHING_WIRED = f"NaN Guard (native) has no input.{WIRE}"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """choose(locale): make this process look like a ComfyUI whose page is set to this language."""
    settings = tmp_path / "default" / "comfy.settings.json"
    settings.parent.mkdir()
    seconds = count(1)
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_user_directory=lambda: str(tmp_path)))

    def choose(locale: object) -> None:
        settings.write_text(json.dumps({"Comfy.Locale": locale}))
        os.utime(settings, (0, next(seconds)))

    return choose


@pytest.mark.parametrize("language_", messages.LANGUAGES)
def test_every_message_has_translation_with_same_placeholders(language_: str) -> None:
    """If it fails: run `python scripts/messages.py`, and fill in the empty entries."""
    catalogue = messages.catalogue(language_)
    assert set(catalogue) == messages.templates() and not messages.made_at_run_time()
    for template, translation in catalogue.items():
        assert translation and sorted(re.findall(r"\{\d\}", translation)) == sorted(re.findall(r"\{\d\}", template))


@pytest.mark.parametrize(
    ("locale", "message"),
    [
        ("zh", f"“NaN 守护（原生）”没有任何连接。{WIRE}"),
        ("ru", f"К узлу «Защита от NaN (встроенные модели)» ничего не подключено.{WIRE}"),
        ("en", NOTHING_WIRED),
        ("fr", NOTHING_WIRED),
        ("../zh", NOTHING_WIRED),
        (3, NOTHING_WIRED),
        ({}, NOTHING_WIRED),
        (None, NOTHING_WIRED),
    ],
)
def test_node_error_is_in_language_of_page(page: Choose, locale: object, message: str) -> None:
    page(locale)
    with pytest.raises(BadInput) as caught:
        GUARD().apply()
    assert str(caught.value) == message


def test_messages_are_english_without_comfyui() -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(NOTHING_WIRED)}$"):
        GUARD().apply()
    assert (
        language.page_language() == ""
        and language.translated("1 step, 1 recomputed in fp32") == "1 step, 1 recomputed in fp32"
    )


def test_page_language_applies_until_user_chooses_one(page: Choose, tmp_path: Path) -> None:
    file = tmp_path / "default" / "comfy.settings.json"
    file.write_text(json.dumps({"OneDiffGuard.Language": "ru"}))
    assert language.page_language() == "ru"
    page("zh")
    assert language.page_language() == "zh"


def test_change_of_language_takes_effect_at_once(page: Choose) -> None:
    texts = []
    for locale in ("zh", "ru", "en"):
        page(locale)
        at, reruns = Message("step {}/{}", 3, 50), Message("{} recomputed in fp32", 2)
        texts.append(language.translated(joined(" · ", (at, "fp16", reruns, in_words(180)))))
    assert texts == [
        "第 3/50 步 · fp16 · 用 fp32 重算 2 次 · 还需 3 分钟",
        "шаг 3/50 · fp16 · пересчитано в fp32: 2 · осталось 3 мин",
        "step 3/50 · fp16 · 2 recomputed in fp32 · 3 min left",
    ]


STEP = StepRecord("denoiser", 0, None, "bf16", "finite", 0.1, 1.0)
RERUN = Rerun("blocks.7.ff", 9e4, Message("{} from here on", ALL_LAYERS_SCALED), 0.1, None)


def _report(variant: Variant, architecture: str, component: Component, *steps: StepRecord) -> RunReport:
    plan = choose(named(architecture), variant, component, Precision.AUTO)
    return RunReport(variant.name, architecture, plan, steps=list(steps))


def size_error(**sizes: int) -> str:
    with pytest.raises(BadSize) as caught:
        FAMILIES["CogVideoXPipeline"].sizes.check(**sizes)
    return message_of(caught.value)


@pytest.mark.parametrize(
    ("build", "chinese"),
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
        (lambda: size_error(width=100), "width 是 100，但必须是 16 的倍数，从 16 到 4096。 Nearest: 96."),
        (lambda: pickle.loads(pickle.dumps(Message("decoding part {} of {}", 1, 2))), "解码第 1/2 部分"),
        (lambda: copy.deepcopy(Message("decoding part {} of {}", 1, 2)), "解码第 1/2 部分"),
        (lambda: "nobody knows this, nor that.", "nobody knows this, nor that."),
        (lambda: Message("{}", "/models/a: b, {0}; d"), "/models/a: b, {0}; d"),
        (lambda: "decoding 1 of 2", "decoding 1 of 2"),  # text of another program
    ],
)
def test_composed_messages_are_translated_part_by_part(page: Choose, build: Callable[[], str], chinese: str) -> None:
    page("zh")
    assert language.translated(build()) == chinese


def test_message_equals_formatted_english_text() -> None:
    """As a string, in logs, for programs and without a page, a message is English."""
    inner = Message("'{}' {:.1%}, {!r}", "{x}", 0.125, "a")
    outer = Message("{} of {}", inner, BadInput("no {}", "{y}"))
    assert inner == "'{x}' 12.5%, 'a'" and str(outer) == f"{outer}" == "'{x}' 12.5%, 'a' of no {y}"
    assert (outer.template, outer.fields[1]) == ("{0} of {1}", "no {y}") and json.loads(json.dumps(outer)) == outer
    assert Message("a {b}") == "a {b}" and ("x" + Message("{}", 1) + "y") == "x1y" and str(BadInput("{")) == "{"


def test_every_reason_of_every_plan_is_translated(page: Choose) -> None:
    """No English word of three or more letters is left in it, except names."""

    page("zh")
    untranslated = set[str]()
    for family in FAMILIES.values():
        for variant in family.variants:
            for architecture in map(named, ARCHITECTURES):
                for request in Precision:
                    try:
                        plan = choose(architecture, variant, Component.DENOISER, request)
                    except PlanImpossible:
                        continue
                    text = language.translated(plan.reason).replace(str(architecture), "").replace(variant.name, "")
                    untranslated |= set(re.findall(r"\b[a-z]{3,}\b", text)) - {"plain", "auto"}
    assert not untranslated


def test_only_errors_of_this_pack_are_translated(page: Choose) -> None:
    page("zh")
    with pytest.raises(ValueError, match=re.escape(NOTHING_WIRED)), language.speaking():
        raise ValueError(NOTHING_WIRED)
    with pytest.raises(HubError) as caught, language.speaking():
        raise HubError("'{}' is not a repository id; use owner/name. Make room.", "a")
    assert str(caught.value) == "“a”不是仓库 id；请写成 owner/name。 Make room."


def test_error_class_has_readable_module_name_inside_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, shown in {"other": HubError.__module__, "execution": "OneDiffGuard"}.items():
        monkeypatch.setitem(sys.modules, module, sys)
        with pytest.raises(HubError) as caught, language.speaking(), language.speaking():
            raise HubError("'{}' is not a repository id; use owner/name.", "a")
        assert (caught.type.__module__, caught.type.__qualname__) == (shown, "HubError")


def test_errors_of_native_guard_are_translated(page: Choose) -> None:
    page("zh")
    with pytest.raises(GuardStopped) as caught, guarded_run(Settings(GuardPolicy())):
        raise GuardStopped(
            "{}: the output in {} is {}, and the guard is set to 'stop'. Set it to 'rerun'.",
            Message("Step {}", 4),
            "fp16",
            Message("NaN or infinite"),
        )
    assert str(caught.value) == "第 4 步：fp16 中的输出是 NaN 或无穷大，而守护设为“stop”。 Set it to 'rerun'."


def test_node_text_is_translated_unless_sent_as_it_is(page: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    server = SimpleNamespace(send_progress_text=lambda text, *_: shown.append(text), client_id="page")
    monkeypatch.setattr(host, "server", lambda: server)
    page("zh")
    host.say("5", joined(" ", (Message("decoding part {} of {}", 1, 2), "<b>")))
    host.say("5", "decoding 1 of 2", as_it_is=True)
    assert shown[1] == "decoding 1 of 2" and shown[0].startswith("解码第 1/2 部分")


def test_validation_error_is_translated(page: Choose) -> None:
    page("zh")
    answer = NODE_CLASS_MAPPINGS["OneDiffGuardNaNGuard"].VALIDATE_INPUTS("{")
    assert "不能用作配置档" in answer
