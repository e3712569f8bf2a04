"""ComfyUI's page in a headless Chromium: opened, given a workflow, queued, looked at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

PATIENCE = 60_000  # milliseconds: bounds what would hang, far from what a busy machine takes
# the page needs none of them; without these flags Chromium calls home at each start
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update")
# pages open what was open last, after they know the nodes
READY = """() => Boolean(window.app?.extensionManager?.workflow?.activeWorkflow?.isLoaded
    && window.LiteGraph?.registered_node_types?.SaveVideo)"""
WINDOW = {"width": 1920, "height": 1000}
LOUD = ("warning", "error")
ENDS = ("execution_success", "execution_error", "execution_interrupted")

SELECT = """type => {  // in the middle of the page, where no bar is above its buttons
    const node = app.graph.nodes.find(node => node.type === type)
    app.canvas.centerOnNode(node)
    app.canvas.selectNode(node)
}"""
LOAD = "async graph => { await window.app.loadGraphData(graph, true, true, null) }"
MISSING = "() => app.graph.nodes.filter(n => n.has_errors || !LiteGraph.registered_node_types[n.type]).map(n => n.type)"
PROMPT = "async () => (await app.graphToPrompt()).output"
NOTICES = """() => [...document.querySelectorAll('.p-toast-message, [role=dialog], [data-testid=error-overlay]')]
    .map(notice => notice.innerText)"""
FRESH = """type => {
    const node = LiteGraph.createNode(type)
    return [node.title, Object.fromEntries((node.widgets ?? []).map(widget => [widget.name, widget.value]))]
}"""
SET_WIDGETS = """values => {
    for (const node of app.graph.nodes)
        for (const widget of node.widgets ?? [])
            if (`${node.type}.${widget.name}` in values) widget.value = values[`${node.type}.${widget.name}`]
}"""
INSERT = """([type, before, values]) => {
    const [target] = app.graph.nodes.filter(node => node.type === before)
    const source = target.getInputNode(0), slot = target.getInputLink(0).origin_slot
    const added = LiteGraph.createNode(type)
    app.graph.add(added)
    added.pos = [target.pos[0], target.pos[1] - 150]
    for (const widget of added.widgets) widget.value = values[widget.name]
    source.connect(slot, added, 0)
    added.connect(0, target, 0)
}"""
ATTACH = """([type, source, slot]) => {
    const [node] = app.graph.nodes.filter(node => node.type === source)
    const added = LiteGraph.createNode(type)
    app.graph.add(added)
    added.pos = [node.pos[0], node.pos[1] - 300]
    node.connect(slot, added, 0)
}"""
LISTED = """([type, name]) => {
    const node = app.graph.nodes.find(node => node.type === type)
    const values = node.widgets.find(widget => widget.name === name).options.values
    new LiteGraph.ContextMenu(typeof values === 'function' ? values() : values, {})
}"""
LISTEN = """ends => {
    window.ended = null
    for (const end of ends) app.api.addEventListener(end, event => { window.ended = [end, event.detail] })
}"""
QUEUE = """async command => {
    await (command ? app.extensionManager.command.execute(command) : app.queuePrompt(0, 1))
}"""
WIDGETS = """type => Object.fromEntries(
    app.graph.nodes.find(node => node.type === type).widgets.map(widget => [widget.name, widget.value]))"""


def values_of(workflow: Mapping[str, Any]) -> dict[int, Any]:
    """What a file holds of our nodes' widgets, by node."""
    return {
        node["id"]: node.get("widgets_values") for node in workflow["nodes"] if node["type"].startswith("OneDiffGuard")
    }


def missing_browser() -> str:
    """Why no browser can be used here, '' where one can."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "browser: playwright is not installed (pip install playwright)"
    return "" if executable() else "browser: no chromium on PATH (Debian's package: chromium)"


def executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Canvas:
    """The page of one ComfyUI server."""

    def __init__(self, page: Any, pictures: Path):
        self._page = page
        self._pictures = pictures
        self.faults: list[str] = []  # URLs that the page asked for in vain
        self.complaints: list[str] = []  # warnings and errors in the page's console, and uncaught ones
        page.on("response", lambda answer: self.faults.append(answer.url) if answer.status >= 400 else None)
        page.on("console", lambda line: self.complaints.append(line.text) if line.type in LOUD else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, url: str) -> None:
        # a newcomer's page opens with the list of templates over the canvas
        self._page.request.post(f"{url}/api/settings", data={"Comfy.TutorialCompleted": True})
        self._page.goto(url)
        self._page.wait_for_function(READY, timeout=PATIENCE)

    def choose(self, url: str, **settings: Any) -> None:
        """Settings of the page, "Comfy." left out and "_" for ".": what an opened page has from then on."""
        for name, value in settings.items():
            address = f"{url}/api/settings/Comfy.{name.replace('_', '.')}"
            self._page.request.post(address, data=json.dumps(value), headers={"Content-Type": "application/json"})

    def switch(self, setting: str, words: str) -> None:
        """Open the settings, look for one, and click its switch."""
        self._page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        self._page.locator("[role=dialog] input:visible").first.fill(words, timeout=PATIENCE)
        self._page.wait_for_timeout(700)
        self._page.locator(f"[id='{setting}'] [role=switch], [role=switch][id='{setting}']").first.click()
        self._page.wait_for_timeout(700)

    def press(self, key: str) -> None:
        self._page.keyboard.press(key)
        self._page.wait_for_timeout(300)

    def titles(self) -> list[str]:
        """What the nodes on the canvas are called."""
        return self._page.evaluate("() => app.graph.nodes.map(node => node.title)")

    def open_help(self, node_type: str) -> None:
        """Select the only node of a type, and press the i above it."""
        self._page.evaluate(SELECT, node_type)
        self._page.get_by_test_id("info-button").first.click(timeout=PATIENCE)

    def load(self, workflow: Mapping[str, Any]) -> None:
        """What opening a file does."""
        self._page.evaluate(LOAD, workflow)
        self._page.wait_for_timeout(500)

    def search(self, name: str) -> None:
        """Double-click the canvas, type a node's name, press Enter, click: the first that is found is put down."""
        box = self._page.locator("[role=dialog] input:visible, .comfy-vue-node-search-container input:visible").first
        for _ in range(5):
            self._page.mouse.dblclick(900, 300)
            self._page.wait_for_timeout(700)
            if box.is_visible():
                break
        box.fill(name, timeout=PATIENCE)
        self._page.wait_for_timeout(700)
        self._page.keyboard.press("Enter")
        self._page.wait_for_timeout(700)
        self._page.mouse.click(900, 300)
        self._page.wait_for_timeout(700)

    def missing(self) -> list[str]:
        """Types of nodes that the page does not know."""
        return self._page.evaluate(MISSING)

    def notices(self) -> list[str]:
        """Texts of what the page lays over the canvas: toasts, dialogs, errors of the workflow."""
        return self._page.evaluate(NOTICES)

    def prompt(self) -> dict[str, Any]:
        """What the page would queue: API format."""
        return self._page.evaluate(PROMPT)

    def prompt_as(self, shipped: Mapping[str, Any]) -> dict[str, Any]:
        """What it would queue, without what it adds to ComfyUI's own nodes in a shipped API file: its titles for them,
        and inputs that a newer ComfyUI has, as in a fresh node."""
        prompt = self.prompt()
        for id_ in prompt.keys() & shipped.keys():
            node, given = prompt[id_], shipped[id_]
            if node["class_type"].startswith("OneDiffGuard"):
                continue
            title, fresh = self._page.evaluate(FRESH, node["class_type"])
            fresh["video-preview"] = ""  # a widget that LoadVideo gets with its file
            for name in node["inputs"].keys() & fresh.keys() - given["inputs"].keys():
                if node["inputs"][name] == fresh[name]:
                    del node["inputs"][name]
            if node["_meta"]["title"] == title:
                node["_meta"] = given["_meta"]
        return prompt

    def saved_values(self) -> dict[int, Any]:
        """What a file would hold of our nodes' widgets, if it were saved now."""
        return values_of(self._page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))"))

    def set_widgets(self, values: Mapping[str, Any]) -> None:
        """{"NodeType.widget": value}"""
        self._page.evaluate(SET_WIDGETS, values)

    def insert(self, node_type: str, before: str, **values: Any) -> None:
        """Put a node into the link to the first input of the only node of type `before`."""
        self._page.evaluate(INSERT, [node_type, before, values])

    def attach(self, node_type: str, source: str, slot: int) -> None:
        """Wire an output of the only node of type `source` to a new node's first input."""
        self._page.evaluate(ATTACH, [node_type, source, slot])

    def unfold(self, node_type: str, widget: str) -> None:
        """Open a drop-down's list."""
        self._page.evaluate(LISTED, [node_type, widget])

    def count(self, selector: str) -> int:
        """How many elements the page has."""
        return self._page.locator(selector).count()

    def text_with(self, part: str) -> str:
        """What a person reads in the first element that shows this text."""
        return self._page.get_by_text(part).first.inner_text()

    def evaluate(self, expression: str, argument: Any = None) -> Any:
        return self._page.evaluate(expression, argument)

    def dispatch(self, event: str, **detail: Any) -> None:
        """What the server tells the page of a run, as if it did."""
        send = "([kind, detail]) => app.api.dispatchEvent(new CustomEvent(kind, {detail}))"
        self._page.evaluate(send, [event, detail])

    def click(self, selector: str) -> None:
        self._page.locator(selector).first.click(timeout=PATIENCE)

    def fill(self, selector: str, text: str) -> None:
        self._page.locator(selector).first.fill(text, timeout=PATIENCE)

    def settle(self) -> None:
        """Let the page lay out what has changed."""
        self._page.wait_for_timeout(700)

    def widgets(self, node_type: str) -> dict[str, Any]:
        return self._page.evaluate(WIDGETS, node_type)

    def queue(self, seconds: float = 90.0, command: str = "") -> tuple[str, Any]:
        """Press Run and wait: how the run ended, and what the server said about it. command: in place of Run."""
        self._page.evaluate(LISTEN, ENDS)
        self._page.evaluate(QUEUE, command)
        return self._ended(seconds)

    def click_run(self, seconds: float = 90.0) -> tuple[str, Any]:
        """The same with the page's own button."""
        self._page.evaluate(LISTEN, ENDS)
        self._page.get_by_role("button", name="Run", exact=True).first.click(timeout=PATIENCE)
        return self._ended(seconds)

    def _ended(self, seconds: float) -> tuple[str, Any]:
        self._page.wait_for_function("() => window.ended", timeout=seconds * 1000)
        self._page.wait_for_timeout(500)
        return tuple(self._page.evaluate("() => window.ended"))

    def press_run(self) -> None:
        """Press Run without waiting for a run, because the server will refuse it."""
        self._page.evaluate("() => { app.queuePrompt(0, 1) }")

    def wait_for_text(self, text: str) -> None:
        self._page.get_by_text(text).first.wait_for(timeout=PATIENCE)

    def wait_for_node(self, node_type: str) -> None:
        """Until the workflow that is opened has one of this type."""
        there = "type => app.graph.nodes.some(node => node.type === type)"
        self._page.wait_for_function(there, arg=node_type, timeout=PATIENCE)

    def wait_for_error(self, text: str, details: str = "View details") -> None:
        """Until it stands on the page, of a run that failed. Newer pages name the node, and the rest after a click
        on `details`."""
        told, more = self._page.get_by_text(text).first, self._page.get_by_text(details).first
        told.or_(more).first.wait_for(timeout=PATIENCE)
        if more.is_visible():
            more.click()
        told.wait_for(timeout=PATIENCE)

    def wait_for_video(self) -> None:
        """Until a video on the page shows its first frame."""
        shown = "() => [...document.querySelectorAll('video')].some(video => video.readyState >= 2)"
        self._page.wait_for_function(shown, timeout=PATIENCE)

    def ask(self, path: str) -> Any:
        """GET from within the page: JSON, or text."""
        return self._page.evaluate(
            "async path => { const r = await fetch(path); const t = await r.text();"
            " try { return JSON.parse(t) } catch { return t } }",
            path,
        )

    @contextmanager
    def beside(self, url: str, user: str) -> Iterator[Canvas]:
        """The page of a server with several users, in a profile of its own where one is logged in, by their id."""
        headers = {"comfy-user": user}
        page = self._page.context.browser.new_page(viewport=WINDOW, locale="en-US", extra_http_headers=headers)
        page.add_init_script(f"localStorage['Comfy.userId'] = localStorage['Comfy.userName'] = '{user}'")
        try:
            opened = Canvas(page, self._pictures)
            opened.open(url)
            yield opened
        finally:
            page.close()

    @contextmanager
    def nodes_2(self, url: str, on: bool = True) -> Iterator[None]:
        """Inside, the page is opened anew, with Nodes 2.0 or in classic mode."""
        self.choose(url, VueNodes_Enabled=on)
        self.open(url)
        yield
        self.choose(url, VueNodes_Enabled=False)

    def picture(self, name: str) -> Path:
        path = self._pictures / f"{name}.png"
        self._page.screenshot(path=str(path))
        return path


@contextmanager
def canvas(
    url: str, pictures: Path, language: str = "en-US", window: Mapping[str, int] = MappingProxyType(WINDOW)
) -> Iterator[Canvas]:
    """A fresh browser profile with the server's page open in it; skips where there is none. language: the browser's."""
    if reason := missing_browser():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(FLAGS))
        try:
            canvas = Canvas(browser.new_page(viewport=dict(window), locale=language), pictures)
            canvas.open(url)
            yield canvas
        finally:
            browser.close()
