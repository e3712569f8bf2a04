"""The strip on nodes that report, as a person meets it: in classic mode of both frontends, and in Nodes 2.0.

0.3.64's preview of Nodes 2.0 shows no widget of any pack, nor ComfyUI's own text on nodes, so it is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import browser
import comfyui_nodes
import families
import legs
import native_checkpoints
import pytest
from native_graphs import SMALL as NATIVE_SMALL
from runs import INSIDE
from templates import api_file, read, ui_file
from test_in_browser import LOADER, MARKUP, SAMPLER, SMALL

pytestmark = legs.IN_CHECKOUTS

WORKFLOW = read(ui_file("cogvideox_text_to_video"))
RUN = SMALL | {
    f"{SAMPLER}.steps": 5,
    f"{SAMPLER}.seed": 4711,
    f"{SAMPLER}.control_after_generate": "fixed",
}
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
SAVED = f"""() => ({NODES})().map(node => {{
    const {{size, order, ...saved}} = node.serialize()
    return saved
}})"""
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
REPORT = "dialog.onediff-guard-report"
PRESS = """type => app.canvas.graph.nodes.find(node => node.type === type)
    .widgets.find(widget => widget.strip).element.querySelector('button').click()"""  # wherever it is on the page
OPENED = f"""() => {{
    const text = document.querySelector('{REPORT} pre')
    const room = text.clientWidth
    return {{text: text.textContent, font: getComputedStyle(text).fontFamily, wide: text.scrollWidth, room}}
}}"""


@pytest.fixture(params=["classic", "nodes_2"])
def canvas(request: pytest.FixtureRequest, server: legs.Server, canvas: browser.Canvas) -> Iterator[browser.Canvas]:
    vue = request.param == "nodes_2"
    if vue and not server.leg.is_current:
        pytest.skip("this ComfyUI has a preview of Nodes 2.0 alone")
    with canvas.nodes_2(server.url, on=vue):
        canvas.complaints.clear()
        yield canvas
    canvas.choose(server.url, Locale=None)


def ran(canvas: browser.Canvas, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The strips after a run of the small workflow, by their nodes' types."""
    canvas.load(WORKFLOW)
    canvas.set_widgets(RUN | dict(more))
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    canvas.settle()
    return canvas.evaluate(STRIPS)


@pytest.fixture
def unknown_model(server: legs.Server) -> str:
    """A model whose runs have taught nothing yet."""
    server.forget()
    models = server.base / "models" / "diffusers"
    return shutil.copytree(models / INSIDE, models / uuid4().hex).name


def complaints(canvas: browser.Canvas) -> list[str]:
    """Not those of the workflow that a fresh page opens with, which asks elsewhere for its models."""
    theirs = ("huggingface.co", "Failed to load resource")
    return [line for line in canvas.complaints if not any(part in line for part in theirs)]


def report(cells: list[str], **more: Any) -> dict[str, Any]:
    plan = {"component": "denoiser", "dtype": "fp16", "reason": "said"}
    more |= {"architecture": "sm75 (Turing)", "calls_per_step": 1, "before": []}
    return {"cells": cells, "plan": plan, "summary": "said", "text": f"all of it\n{MARKUP}", **more}


def test_a_finished_run_says_what_ran_why_and_which_step_was_rerun(
    unknown_model: str, canvas: browser.Canvas, request: pytest.FixtureRequest
) -> None:
    learned = {f"{LOADER}.model": unknown_model, "OneDiffGuardNaNGuard.scope": "learned"}
    told = ran(canvas, learned)
    canvas.picture(f"strip_folded_{request.node.callspec.params['canvas']}")
    assert set(told) == {LOADER, SAMPLER, "OneDiffGuardEncodePrompt", "OneDiffGuardDecodeLatents"}
    sampler = told[SAMPLER]
    assert sampler["cells"] == ["rerun", *["half"] * 4] and sampler["signs"] == ["↻", *["16"] * 4], (
        "a sign each, not a colour alone"
    )
    lines = sampler["text"].splitlines()
    assert lines[:2] == ["Result: OK. Recomputed in fp32: 1.", "fp16 · CPU"]
    assert lines[2] == (
        "fp16, as you chose (which is slow on CPU); overflow protection on; 'transformer_blocks.1' protected; "
        "5 steps, 1 recomputed in fp32."
    )
    assert any(
        line.startswith("Step 1: a value reached ") and "in transformer_blocks.1.ff.net.0.proj." in line
        for line in lines
    )
    assert not any(line.startswith("step 1 ") for line in lines), "the rest is in the report"
    assert all(strip["shown"] and strip["size"][1] >= strip["needed"] - 1 for strip in told.values()), "no overlap"
    assert all(set(strip["below"]) <= {"$$canvas-image-preview"} for strip in told.values()), "preview under the strip"
    assert complaints(canvas) == []


def test_what_is_of_an_earlier_run_says_so_until_its_node_has_run(canvas: browser.Canvas) -> None:
    told = ran(canvas)
    assert told[SAMPLER]["text"].startswith("Result: OK.") and "OK" not in told[LOADER]["text"]
    assert told["OneDiffGuardDecodeLatents"]["text"].startswith("This stage: OK."), "it decodes what it was given"
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


def test_the_whole_report_opens_over_the_page(canvas: browser.Canvas) -> None:
    told = ran(canvas)
    canvas.evaluate("() => { app.canvas.ds.scale = 0.9; app.canvas.ds.offset = [-300, 50] }")
    canvas.evaluate("() => app.canvas.setDirty(true, true)")
    canvas.settle()
    canvas.evaluate(PRESS, SAMPLER)
    canvas.settle()
    canvas.picture("strip_open")
    shown = canvas.evaluate(OPENED)
    assert shown["text"] in [strip["report"] for strip in told.values()] and "monospace" in shown["font"]
    assert shown["text"].index("backend: ") < shown["text"].index("ONEFLOW_"), "plan first, switches last"
    assert shown["wide"] <= shown["room"], "long lines wrap"
    assert {kind: strip["size"] for kind, strip in canvas.evaluate(STRIPS).items()} == {
        kind: strip["size"] for kind, strip in told.items()
    }
    canvas.press("Delete")
    canvas.press("Escape")
    assert canvas.count(REPORT) == 0 and canvas.evaluate(STRIPS).keys() == told.keys(), "keys are the report's alone"
    canvas.evaluate(PRESS, SAMPLER)
    canvas.click(f"{REPORT} button")
    canvas.settle()
    assert canvas.count(REPORT) == 0


@pytest.mark.parametrize(
    ("cells", "ended", "says"),
    [
        (["half", "fp32"], False, "Result: OK."),
        (["rerun", "half"], False, "Result: OK. Recomputed in fp32: 1."),
        (["failed", "half"], False, "Result: NOT OK. Some values are NaN, infinite or clipped."),
        (["half"], True, "Result: not finished, since the run ended early."),
        (["failed"], True, "Result: NOT OK. Some values are NaN, infinite or clipped."),
    ],
)
def test_the_first_line_says_whether_the_result_can_be_used(
    canvas: browser.Canvas, cells: list[str], ended: bool, says: str
) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(cells, ended=ended)]}])
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["text"].splitlines()[0] == says


def test_files_and_prompts_have_no_trace_of_it(canvas: browser.Canvas) -> None:
    canvas.load(WORKFLOW)
    canvas.set_widgets(RUN)
    before = canvas.evaluate(SAVED), ours(canvas)
    assert canvas.queue()[0] == "execution_success"
    canvas.settle()
    assert canvas.evaluate(STRIPS)
    assert (canvas.evaluate(SAVED), ours(canvas)) == before


def ours(canvas: browser.Canvas) -> dict[str, Any]:
    """Our nodes, as the page would queue them."""
    return {id_: node for id_, node in canvas.prompt().items() if node["class_type"].startswith("OneDiffGuard")}


def test_it_is_there_again_from_the_cache_after_undo_and_in_another_tab(
    canvas: browser.Canvas, request: pytest.FixtureRequest
) -> None:
    first = ran(canvas, {f"{SAMPLER}.seed": sum(map(ord, request.node.name))})[SAMPLER]["cells"]
    assert canvas.queue()[0] == "execution_success"
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "from the cache"
    canvas.evaluate(UNDO)
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "after undo"
    canvas.load(WORKFLOW)
    assert canvas.evaluate(STRIPS) == {}, "another tab, in which nothing ran"
    canvas.click(".workflow-tabs .workflow-label >> nth=-2")
    canvas.settle()
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == first, "back in its tab"
    assert canvas.evaluate(PASTE, SAMPLER) == [True, False], "a copy has not run"
    assert complaints(canvas) == []


def test_a_reopened_page_shows_it_with_the_next_run_and_of_an_earlier_one(
    canvas: browser.Canvas, server: legs.Server
) -> None:
    first = ran(canvas)
    outputs = max(canvas.ask("/api/history").values(), key=lambda run: run["prompt"][0])["outputs"]
    canvas.open(server.url)
    again = ran(canvas)
    assert {kind: strip["cells"] for kind, strip in again.items()} == {
        kind: strip["cells"] for kind, strip in first.items()
    }
    canvas.load(WORKFLOW)
    assert canvas.evaluate(STRIPS) == {}
    canvas.evaluate("outputs => { app.nodeOutputs = outputs }", outputs)  # what opening a job of the queue does
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == CELLS


def test_in_a_subgraph(canvas: browser.Canvas) -> None:
    canvas.load(WORKFLOW)
    canvas.set_widgets(RUN | {f"{SAMPLER}.seed": 12})
    canvas.evaluate(INTO_SUBGRAPH, SAMPLER)
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    assert canvas.evaluate(STRIPS)[SAMPLER]["cells"] == CELLS
    assert complaints(canvas) == []
    canvas.evaluate("() => app.canvas.openSubgraph(app.graph.nodes.find(node => node.subgraph).subgraph)")
    canvas.settle()
    canvas.evaluate(PRESS, SAMPLER)
    canvas.press("Escape")
    assert canvas.count(REPORT) == 0 and canvas.evaluate("() => app.canvas.graph !== app.graph.rootGraph"), (
        "still in it"
    )


def test_markup_is_shown_and_never_run(canvas: browser.Canvas) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": [f"because of {MARKUP}\n{MARKUP}"], "onediff_guard": [report(MIXED)]}])
    canvas.settle()
    strip = canvas.evaluate(STRIPS)[SAMPLER]
    assert strip["text"].count(MARKUP) == 2 and MARKUP in strip["report"]
    assert canvas.count("img[src='x']") == 0 and canvas.evaluate("() => window.ran ?? []") == []


@pytest.mark.parametrize(
    ("cells", "most"), [(["half"] * 400 + ["rerun"] + ["fp32"] * 599, 3), (["half", "rerun"] * 500, 1000)]
)
def test_a_long_run_stays_compact(canvas: browser.Canvas, cells: list[str], most: int) -> None:
    canvas.load(WORKFLOW)
    canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(cells)]}])
    canvas.settle()
    canvas.picture(f"strip_long_{most}")
    strip = canvas.evaluate(STRIPS)[SAMPLER]
    assert len(strip["cells"]) == most and strip["size"][1] < 750
    reruns = cells.count("rerun")
    assert f"recomputed in fp32: {'step 401' if reruns == 1 else reruns}" in strip["text"]


def test_in_the_pages_language(canvas: browser.Canvas, server: legs.Server) -> None:
    for locale, says in {"zh": "用 fp32 重算: 第 1 步", "ru": "пересчитано в fp32: шаг 1"}.items():
        canvas.choose(server.url, Locale=locale)
        canvas.open(server.url)
        canvas.load(WORKFLOW)
        canvas.evaluate(SHOW, [SAMPLER, {"text": ["said"], "onediff_guard": [report(MIXED)]}])
        canvas.settle()
        canvas.picture(f"strip_{locale}")
        assert says in canvas.evaluate(STRIPS)[SAMPLER]["text"]


def test_a_loader_says_what_runs_and_the_report_behind_it_is_in_columns(canvas: browser.Canvas) -> None:
    name = "cogview4_text_to_image"
    canvas.load(read(ui_file(name)))
    small = families.small(api_file(name), canvas.ask("/object_info"))
    canvas.set_widgets(
        {
            f"{node['class_type']}.{key}": value
            for node in small.values()
            for key, value in node["inputs"].items()
            if not isinstance(value, list)  # a link
        }
    )
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    canvas.settle()
    canvas.picture("loader")
    strip = canvas.evaluate(STRIPS)["OneDiffGuardLoadPipeline"]
    assert strip["report"].startswith("Plan for CogView4-6B") and "This machine" in strip["report"]
    assert not strip["cells"]
    assert complaints(canvas) == []


@pytest.fixture
def native_checkpoint(server: legs.Server) -> Iterator[None]:
    file = server.base / "models" / "checkpoints" / comfyui_nodes.SD15_FILE
    file.parent.mkdir(exist_ok=True)
    native_checkpoints.write_sd15(file, overflows=False)
    yield
    file.unlink()


def test_a_native_guard_has_one_of_all_samplers_that_use_it(
    canvas: browser.Canvas, server: legs.Server, native_checkpoint: None, request: pytest.FixtureRequest
) -> None:
    canvas.open(server.url)  # lists the checkpoints anew
    canvas.complaints.clear()
    canvas.load(read(ui_file("native_sd15_text_to_image")))
    canvas.set_widgets(
        {
            "CheckpointLoaderSimple.ckpt_name": comfyui_nodes.SD15_FILE,
            **{f"EmptyLatentImage.{key}": NATIVE_SMALL[key] for key in ("width", "height")},
            "KSampler.steps": 2,
            "KSampler.seed": sum(map(ord, request.node.name)),  # else the second mode's run is the first's
        }
    )
    end, detail = canvas.queue()
    assert end == "execution_success", detail
    canvas.settle()
    canvas.picture("strip_native")
    strip = canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]
    assert strip["cells"] == ["fp32"] * 3 and "SD15" in strip["report"], "two steps, and the VAE's call"
    assert all(kind in strip["text"] for kind in ("SD15 computes", "VAE decoder: AutoencoderKL computes"))
    (told,) = canvas.evaluate(
        "() => Object.values(app.nodeOutputs).flatMap(({onediff_guard}) => onediff_guard ?? [])"
        ".filter(({plan}) => plan.component === 'denoiser')"
    )
    canvas.evaluate("told => { window.told = told }", told)
    for prompt, cells in (("one", ["half"]), ("one", ["rerun"]), ("two", ["fp32"]), ("two", ["half"])):
        canvas.evaluate(NATIVE_REPORT, ["OneDiffGuardNaNGuardNative", prompt, cells])
    assert canvas.evaluate(STRIPS)["OneDiffGuardNaNGuardNative"]["cells"] == ["fp32", "half"], "of the last prompt"
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
    assert complaints(canvas) == []
