"""The report strip on nodes, on ComfyUI's page: in classic mode of both frontends, and in Nodes 2.0.

The preview of Nodes 2.0 in 0.3.64 shows no widgets of packs, and no text on nodes, so it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import browser
import comfyui_nodes
import legs
import native_checkpoints
import pytest
from native_graphs import SMALL as NATIVE_SMALL
from runs import INSIDE
from templates import read, ui_file
from test_in_browser import LOADER, MARKUP, SAMPLER, SMALL

pytestmark = legs.IN_CHECKOUTS

WORKFLOW = read(ui_file("cogvideox_text_to_video"))
RUN = SMALL | {
    f"{SAMPLER}.steps": 5,
    f"{SAMPLER}.seed": 4711,
    f"{SAMPLER}.control_after_generate": "fixed",
}
GUARD = "OneDiffGuardNaNGuard"
CELLS = ["half"] * 5
MIXED = ["rerun", "half", "half", "fp32", "cached"]
NODES = """() => [app.rootGraph ?? app.graph].flatMap(root =>
    [root, ...(root.subgraphs?.values() ?? [])].flatMap(graph => graph.nodes))"""
STRIPS = f"""() => Object.fromEntries(({NODES})().map(node => [node.type, node]).map(([type, node]) => {{
    const widget = node.widgets?.find(widget => widget.strip)
    const strip = widget?.element
    return [type, strip && {{
        text: strip.firstChild.innerText, shown: strip.isConnected, stale: Boolean(strip.querySelector('.stale')),
        cells: [...strip.querySelectorAll('.cells > .cell')].map(cell => cell.classList[1]),
        signs: [...strip.querySelectorAll('.cells > .cell')].map(cell => cell.textContent),
        report: widget.strip.whole,
        size: [...node.size], needed: node.computeSize()[1],
        below: node.widgets.slice(node.widgets.findIndex(widget => widget.strip) + 1).map(widget => widget.name),
    }}]
}}).filter(([, strip]) => strip))"""
SHOW = """([type, output]) => {
    const node = app.graph.nodes.find(node => node.type === type)
    app.nodeOutputs = {[node.id]: output}
}"""
UNDO = """async () => {
    const active = app.extensionManager.workflow.activeWorkflow
    await app.loadGraphData(JSON.parse(JSON.stringify(app.graph.serialize())), false, false, active)
}"""
INTO_SUBGRAPH = """type => {
    const node = app.graph.nodes.find(node => node.type === type)
    app.canvas.graph.convertToSubgraph(new Set([node]))
}"""
PASTE = """type => {
    const node = app.graph.nodes.find(node => node.type === type)
    app.canvas.selectItems([node])
    app.canvas.copyToClipboard()
    app.canvas.pasteFromClipboard()
    return app.graph.nodes.filter(node => node.type === type).map(node => (node.widgets ?? []).some(w => w.strip))
}"""
NATIVE_REPORT = """([type, prompt, cells]) => {
    const node = app.graph.nodes.find(node => node.type === type)
    const output = {text: ['said'], onediff_guard: [{...window.told, cells}]}
    const detail = {node: String(node.id), prompt, workflow: (app.rootGraph ?? app.graph).id, output}
    app.api.dispatchEvent(new CustomEvent('onediff_guard.report', {detail}))
}"""
EXECUTING = "id => { app.api.dispatchEvent(new CustomEvent('executing', {detail: id})) }"
TEXTS = """type => app.graph.nodes.find(node => node.type === type)
    .widgets.filter(widget => widget.name === '$$node-text-preview').length"""
REPORT = "dialog.onediff-guard-report"
PRESS = """type => app.canvas.graph.nodes.find(node => node.type === type)
    .widgets.find(widget => widget.strip).element.querySelector('button').click()"""  # also outside the visible area
OPENED = f"""() => {{
    const text = document.querySelector('{REPORT} pre')
    const room = text.clientWidth
    return {{text: text.textContent, font: getComputedStyle(text).fontFamily, wide: text.scrollWidth, room}}
}}"""


@pytest.fixture(params=["classic", "nodes_2"])
def canvas(request: pytest.FixtureRequest, server: legs.Server, canvas: browser.Canvas) -> Iterator[browser.Canvas]:
    vue = request.param == "nodes_2"
    if vue and not server.leg.is_current:
        pytest.skip("this ComfyUI has only a preview of Nodes 2.0")
    with canvas.nodes_2(server.url, on=vue):
        canvas.console_errors.clear()
        yield canvas
    canvas.set_settings(server.url, Locale=None)


def run_workflow(canvas: browser.Canvas, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Run the small workflow, and return its strips by node type."""
    canvas.load(WORKFLOW)
    canvas.set_widgets(RUN | dict(more))
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    canvas.settle()
    return canvas.evaluate(STRIPS)


def console_errors(canvas: browser.Canvas) -> list[str]:
    """Return console errors, except those of the default workflow, which requests its models elsewhere."""
    ignored = ("huggingface.co", "Failed to load resource")
    return [line for line in canvas.console_errors if not any(part in line for part in ignored)]


def report(cells: list[str], **more: Any) -> dict[str, Any]:
    plan = {"component": "denoiser", "dtype": "fp16", "reason": "said"}
    more |= {"architecture": "sm75 (Turing)", "calls_per_step": 1, "before": []}
    return {"cells": cells, "plan": plan, "summary": "said", "text": f"all of it\n{MARKUP}", **more}


def test_strip_shows_result_plan_and_reason(canvas: browser.Canvas, request: pytest.FixtureRequest) -> None:
    strips = run_workflow(canvas, {f"{LOADER}.model": INSIDE})
    canvas.picture(f"strip_folded_{request.node.callspec.params['canvas']}")
    assert set(strips) == {LOADER, SAMPLER, "OneDiffGuardEncodePrompt", "OneDiffGuardDecodeLatents"}
    sampler = strips[SAMPLER]
    assert sampler["cells"] == CELLS and sampler["signs"] == ["16"] * 5, "each cell has a sign, not only a colour"
    assert sampler["text"].splitlines()[:3] == [
        "Result: OK.",
        "fp16 · CPU",
        "fp16, as you chose (which is slow on CPU); overflow protection; 5 steps, all fine.",
    ]
    assert all(strip["shown"] and strip["size"][1] >= strip["needed"] - 1 for strip in strips.values()), "no overlap"
    assert all(set(strip["below"]) <= {"$$canvas-image-preview"} for strip in strips.values()), (
        "preview under the strip"
    )
    assert console_errors(canvas) == []


def test_strip_is_marked_stale_until_its_node_runs_again(canvas: browser.Canvas) -> None:
    strips = run_workflow(canvas)
    assert strips[SAMPLER]["text"].startswith("Result: OK.") and "OK" not in strips[LOADER]["text"]
    assert strips["OneDiffGuardDecodeLatents"]["text"].startswith("This stage: OK."), "a decoder reports its own stage"
    ids = canvas.evaluate("() => Object.fromEntries(app.graph.nodes.map(node => [node.type, String(node.id)]))")

    prompt = max(canvas.ask("/api/history").values(), key=lambda run: run["prompt"][0])["prompt"][1]

    def after(event: str, **detail: Any) -> dict[str, Any]:
        canvas.dispatch(event, prompt_id=prompt, **detail)
        canvas.settle()
        return canvas.evaluate(STRIPS)

    old = after("execution_start")
    assert all(strip["stale"] and "From an earlier run." in strip["text"] for strip in old.values())
    cached = after("execution_cached", nodes=[ids[LOADER]])
    assert [kind for kind, strip in cached.items() if not strip["stale"]] == [LOADER]
    failed = after("execution_error", node_id=ids[SAMPLER], exception_message="no room\nfor it", exception_type="Full")
    canvas.picture("strip_failed")
    assert "This run failed here: no room" in failed[SAMPLER]["text"] and failed[SAMPLER]["stale"]
    cancelled = after("execution_interrupted", node_id=ids[SAMPLER])
    assert "This run was cancelled here." in cancelled[SAMPLER]["text"] and cancelled[SAMPLER]["stale"]

    canvas.load(WORKFLOW)  # nothing has run: nodes show only texts
    for kind in (SAMPLER, GUARD):
        canvas.dispatch("progress_text", nodeId=ids[kind], text="step 1/9 · 5 s left")
    cancelled = after("execution_interrupted", node_id=ids[SAMPLER])
    assert cancelled[SAMPLER]["text"].strip() == "This run was cancelled here."
    assert after("execution_start") == {}
    canvas.evaluate(EXECUTING, ids[GUARD])
    assert canvas.evaluate(TEXTS, GUARD) == 0, "this run has said nothing on it"


def test_full_report_opens_in_dialog(canvas: browser.Canvas) -> None:
    strips = run_workflow(canvas)
    canvas.evaluate("() => { app.canvas.ds.scale = 0.9; app.canvas.ds.offset = [-300, 50] }")
    canvas.evaluate("() => app.canvas.setDirty(true, true)")
    canvas.settle()
    canvas.evaluate(PRESS, SAMPLER)
    canvas.settle()
    canvas.picture("strip_open")
    shown = canvas.evaluate(OPENED)
    assert shown["text"] in [strip["report"] for strip in strips.values()] and "monospace" in shown["font"]
    assert shown["text"].index("backend: ") < shown["text"].index("ONEFLOW_"), "plan first, switches last"
    assert shown["wide"] <= shown["room"], "long lines wrap"
    assert {kind: strip["size"] for kind, strip in canvas.evaluate(STRIPS).items()} == {
        kind: strip["size"] for kind, strip in strips.items()
    }
    canvas.press("Delete")
    canvas.press("Escape")
    assert canvas.count(REPORT) == 0 and canvas.evaluate(STRIPS).keys() == strips.keys(), "keys go only to the dialog"
    canvas.evaluate(PRESS, SAMPLER)
    canvas.click(f"{REPORT} button")
    canvas.settle()
    assert canvas.count(REPORT) == 0


@pytest.mark.parametrize(
    ("cells", "ended", "expected"),
    [
        (["half", "fp32"], False, "Result: OK."),
        (["rerun", "half"], False, "Result: OK. Recomputed in fp32: 1."),
        (["failed", "half"], False, "Result: NOT OK. Some values are NaN, infinite or clipped."),
        (["half"], True, "Result: not finished, since the run ended early."),
        (["failed"], True, "Result: NOT OK. Some values are NaN, infinite or clipped."),
    ],
)
def test_first_line_of_strip_gives_verdict(
    canvas: browser.Canvas, cells: list[str], ended: bool, expected: str
) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(cells, ended=ended)]}])
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["text"].splitlines()[0] == expected


def test_strip_returns_after_cached_run_undo_and_tab_switch(
    canvas: browser.Canvas, request: pytest.FixtureRequest
) -> None:
    first = run_workflow(canvas, {f"{SAMPLER}.seed": sum(map(ord, request.node.name))})[SAMPLER]["cells"]
    assert canvas.queue()[0] == "execution_success"
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "from the cache"
    canvas.evaluate(UNDO)
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "after undo"
    canvas.load(WORKFLOW)
    assert canvas.evaluate(STRIPS) == {}, "another tab without a run"
    canvas.click(".workflow-tabs .workflow-label >> nth=-2")
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "back in its tab"
    assert canvas.evaluate(PASTE, SAMPLER) == [True, False], "a copy has not run"
    assert console_errors(canvas) == []


def test_reopened_page_shows_strips_of_next_and_earlier_runs(canvas: browser.Canvas, server: legs.Server) -> None:
    first = run_workflow(canvas)
    outputs = max(canvas.ask("/api/history").values(), key=lambda run: run["prompt"][0])["outputs"]
    canvas.open(server.url)
    again = run_workflow(canvas)
    assert {kind: strip["cells"] for kind, strip in again.items()} == {
        kind: strip["cells"] for kind, strip in first.items()
    }
    canvas.load(WORKFLOW)
    assert canvas.evaluate(STRIPS) == {}
    canvas.evaluate("outputs => { app.nodeOutputs = outputs }", outputs)  # as when a job of the queue is opened
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == CELLS


def test_strip_works_in_subgraph(canvas: browser.Canvas) -> None:
    canvas.load(WORKFLOW)
    canvas.set_widgets(RUN | {f"{SAMPLER}.seed": 12})
    canvas.evaluate(INTO_SUBGRAPH, SAMPLER)
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == CELLS
    assert console_errors(canvas) == []
    canvas.evaluate("() => app.canvas.openSubgraph(app.graph.nodes.find(node => node.subgraph).subgraph)")
    canvas.settle()
    canvas.evaluate(PRESS, SAMPLER)
    canvas.press("Escape")
    assert canvas.count(REPORT) == 0 and canvas.evaluate("() => app.canvas.graph !== app.graph.rootGraph"), (
        "still in the subgraph"
    )


def test_markup_in_strip_is_shown_as_text(canvas: browser.Canvas) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": [f"because of {MARKUP}\n{MARKUP}"], "onediff_guard": [report(MIXED)]}])
    canvas.settle()
    strip = canvas.evaluate(STRIPS)[SAMPLER]
    assert strip["text"].count(MARKUP) == 2 and MARKUP in strip["report"]
    assert canvas.count("img[src='x']") == 0 and canvas.evaluate("() => window.ran ?? []") == []


@pytest.mark.parametrize(
    ("cells", "most"), [(["half"] * 400 + ["rerun"] + ["fp32"] * 599, 3), (["half", "rerun"] * 500, 1000)]
)
def test_strip_of_long_run_stays_compact(canvas: browser.Canvas, cells: list[str], most: int) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(cells)]}])
    canvas.settle()
    canvas.picture(f"strip_long_{most}")
    strip = canvas.evaluate(STRIPS)[SAMPLER]
    assert len(strip["cells"]) == most and strip["size"][1] < 750
    reruns = cells.count("rerun")
    assert f"recomputed in fp32: {'step 401' if reruns == 1 else reruns}" in strip["text"]


def test_strip_uses_language_of_page(canvas: browser.Canvas, server: legs.Server) -> None:
    for locale, expected in {"zh": "用 fp32 重算: 第 1 步", "ru": "пересчитано в fp32: шаг 1"}.items():
        canvas.set_settings(server.url, Locale=locale)
        canvas.open(server.url)
        canvas.load(WORKFLOW)
        canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(MIXED)]}])
        canvas.settle()
        canvas.picture(f"strip_{locale}")
        assert expected in canvas.evaluate(STRIPS)[SAMPLER]["text"]


@pytest.fixture
def native_checkpoint(server: legs.Server) -> Iterator[None]:
    file = server.base / "models" / "checkpoints" / comfyui_nodes.SD15_FILE
    file.parent.mkdir(exist_ok=True)
    native_checkpoints.write_sd15(file, overflows=False)
    yield
    file.unlink()


def test_native_guard_merges_reports_of_all_its_samplers(
    canvas: browser.Canvas, server: legs.Server, native_checkpoint: None, request: pytest.FixtureRequest
) -> None:
    canvas.open(server.url)  # updates the list of checkpoints
    canvas.console_errors.clear()
    canvas.load(read(ui_file("native_sd15_text_to_image")))
    canvas.set_widgets(
        {
            "CheckpointLoaderSimple.ckpt_name": comfyui_nodes.SD15_FILE,
            **{f"EmptyLatentImage.{key}": NATIVE_SMALL[key] for key in ("width", "height")},
            "KSampler.steps": 2,
            "KSampler.seed": sum(map(ord, request.node.name)),  # the second mode's run is not cached
        }
    )
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    canvas.settle()
    canvas.picture("strip_native")
    strip = canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]
    assert strip["cells"] == ["fp32"] * 3 and "SD15" in strip["report"], "two steps and the VAE's call"
    assert all(kind in strip["text"] for kind in ("SD15 runs in", "VAE decoder: AutoencoderKL runs in"))
    (told,) = canvas.evaluate(
        "() => Object.values(app.nodeOutputs).flatMap(({onediff_guard}) => onediff_guard ?? [])"
        ".filter(({plan}) => plan.component === 'denoiser')"
    )
    canvas.evaluate("told => { window.told = told }", told)
    for prompt, cells in (("one", ["half"]), ("one", ["rerun"]), ("two", ["fp32"]), ("two", ["half"])):
        canvas.evaluate(NATIVE_REPORT, ["OneDiffGuardNaNGuardNative", prompt, cells])
    assert canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]["cells"] == ["fp32", "half"], "only of the last prompt"
    detail = canvas.evaluate(
        """type => ({
            node: String(app.graph.nodes.find(node => node.type === type).id), prompt: 'two',
            workflow: (app.rootGraph ?? app.graph).id,
            output: {text: ['said'], onediff_guard: [{...window.told, cells: ['failed']}]},
        })""",
        "OneDiffGuardNaNGuardNative",
    )
    canvas.load(WORKFLOW)  # another tab
    canvas.dispatch("onediff_guard.report", **detail)
    assert canvas.evaluate(STRIPS) == {}
    for _ in ("once", "and again"):
        canvas.click(".workflow-tabs .workflow-label >> nth=-2")
        canvas.settle()
        strip = canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]
        assert strip["cells"] == ["fp32", "half", "failed"] and strip["text"].startswith("Result: NOT OK.")
        canvas.click(".workflow-tabs .workflow-label >> nth=-1")
        canvas.settle()
    canvas.click(".workflow-tabs .workflow-label >> nth=-2")
    canvas.settle()
    canvas.evaluate(
        """type => {
            const nodes = app.graph.nodes.filter(node => node.type === type).map(node => String(node.id))
            for (const kind of ['execution_start', 'execution_cached'])
                app.api.dispatchEvent(new CustomEvent(kind, {detail: {prompt_id: 'three', nodes}}))
        }""",
        "OneDiffGuardNaNGuardNative",
    )
    assert canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]["stale"], "its sampler has not run again"
    assert console_errors(canvas) == []
