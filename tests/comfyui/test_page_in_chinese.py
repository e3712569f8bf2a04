"""ComfyUI's page in a Chinese browser: names, help, a node's report and an error's first words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import legs
import pytest
from templates import read, ui_file
from test_in_browser import SAMPLER, SMALL

pytestmark = legs.IN_CHECKOUTS


@pytest.fixture(scope="module")
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures, language="zh-CN") as opened:
        yield opened


@pytest.fixture
def opened(canvas: browser.Canvas) -> browser.Canvas:
    canvas.load(read(ui_file("cogvideox_text_to_video")))
    return canvas


def test_nodes_and_categories_have_chinese_names(opened: browser.Canvas) -> None:
    opened.picture("chinese_names")
    assert {"加载管线", "编码提示词", "NaN 守护", "CogVideoX 采样", "解码 Latent"} <= set(opened.titles())
    categories = opened.evaluate("() => LiteGraph.registered_node_types.OneDiffGuardDecodeLatents.category")
    assert categories == "OneDiff Guard/采样"


def test_help_page_is_in_chinese(opened: browser.Canvas) -> None:
    opened.open_help("OneDiffGuardNaNGuard")
    opened.wait_for_text("设定出现 NaN 或无穷大时怎么办")
    opened.picture("chinese_help")


def test_run_report_is_in_chinese(opened: browser.Canvas) -> None:
    opened.set_widgets(SMALL)
    end, detail = opened.queue()
    assert end == "execution_success", detail
    opened.picture("chinese_run")
    shown = " ".join(map(str, opened.widgets(SAMPLER).values()))
    assert "fp16，按你的选择" in shown
    assert "溢出保护" in shown and "2 步，全部正常。" in shown
    run = max(opened.ask("/api/history").values(), key=lambda each: each["prompt"][0])
    (reports,) = (output["onediff_guard"] for output in run["outputs"].values() if "2 步" in str(output.get("text")))
    assert "2 steps, all fine." in reports[0]["summary"], "fields for programs stay English"


def test_error_begins_in_chinese(opened: browser.Canvas) -> None:
    opened.press_run()
    opened.wait_for_error("未找到模型“CogVideoX-2b”", details="查看详情")
    opened.picture("chinese_error")
