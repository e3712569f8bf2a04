"""ComfyUI's page in a headless Chromium: opens it, loads workflows, queues runs, reads results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from waiting import HANG_SECONDS

TIMEOUT_MS = 60_000  # milliseconds: a limit for hangs, far above what a busy machine needs
# the page works without them; they keep Chromium from calling home at each start
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update")
# a page opens the last workflow after it has loaded the nodes
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
ATTACH = """([type, source, slot]) => {
    const [node] = app.graph.nodes.filter(node => node.type === source)
    const added = LiteGraph.createNode(type)
    app.graph.add(added)
    added.pos = [node.pos[0], node.pos[1] - 300]
    node.connect(slot, added, 0)
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
    """Return the widget values of our nodes in a workflow file, by node id."""
    return {
        node["id"]: node.get("widgets_values") for node in workflow["nodes"] if node["type"].startswith("OneDiffGuard")
    }


def missing_browser() -> str:
    """Return why no browser can be used here; '' if one can."""
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
        self.failed_urls: list[str] = []  # URLs of failed requests
        self.console_errors: list[str] = []  # warnings and errors of the page's console, and uncaught errors
        page.on("response", lambda answer: self.failed_urls.append(answer.url) if answer.status >= 400 else None)
        page.on("console", lambda line: self.console_errors.append(line.text) if line.type in LOUD else None)
        page.on("pageerror", lambda error: self.console_errors.append(str(error)))

    def open(self, url: str) -> None:
        # a new user's page opens with the list of templates over the canvas
        self._page.request.post(f"{url}/api/settings", data={"Comfy.TutorialCompleted": True})
        self._page.goto(url)
        self._page.wait_for_function(READY, timeout=TIMEOUT_MS)

    def set_settings(self, url: str, **settings: Any) -> None:
        """Set settings, for pages opened afterwards. Names are without "Comfy.", with "_" for "."."""
        for name, value in settings.items():
            address = f"{url}/api/settings/Comfy.{name.replace('_', '.')}"
            self._page.request.post(address, data=json.dumps(value), headers={"Content-Type": "application/json"})

    def click_switch(self, setting: str, words: str) -> None:
        """Open the settings, search for one, and click its click_switch."""
        self._page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        self._page.locator("[role=dialog] input:visible").first.fill(words, timeout=TIMEOUT_MS)
        self._page.wait_for_timeout(700)
        self._page.locator(f"[id='{setting}'] [role=switch], [role=switch][id='{setting}']").first.click()
        self._page.wait_for_timeout(700)

    def press(self, key: str) -> None:
        self._page.keyboard.press(key)
        self._page.wait_for_timeout(300)

    def titles(self) -> list[str]:
        """Return the titles of the nodes on the canvas."""
        return self._page.evaluate("() => app.graph.nodes.map(node => node.title)")

    def open_help(self, node_type: str) -> None:
        """Select the only node of a type, and click the info button above it."""
        self._page.evaluate(SELECT, node_type)
        self._page.get_by_test_id("info-button").first.click(timeout=TIMEOUT_MS)

    def load(self, workflow: Mapping[str, Any]) -> None:
        """Load a workflow, as opening a file does."""
        self._page.evaluate(LOAD, workflow)
        self._page.wait_for_timeout(500)

    def search(self, name: str) -> None:
        """Double-click the canvas, type a node's name, press Enter, click: this adds the first match."""
        box = self._page.locator("[role=dialog] input:visible, .comfy-vue-node-search-container input:visible").first
        for _ in range(5):
            self._page.mouse.dblclick(900, 300)
            self._page.wait_for_timeout(700)
            if box.is_visible():
                break
        box.fill(name, timeout=TIMEOUT_MS)
        self._page.wait_for_timeout(700)
        self._page.keyboard.press("Enter")
        self._page.wait_for_timeout(700)
        self._page.mouse.click(900, 300)
        self._page.wait_for_timeout(700)

    def missing(self) -> list[str]:
        """Return the node types that the page does not know."""
        return self._page.evaluate(MISSING)

    def notices(self) -> list[str]:
        """Return the texts of toasts, dialogs and workflow errors over the canvas."""
        return self._page.evaluate(NOTICES)

    def prompt(self) -> dict[str, Any]:
        """Return the prompt that the page would queue, in API format."""
        return self._page.evaluate(PROMPT)

    def prompt_like(self, shipped: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt without the page's additions to ComfyUI's own nodes in a shipped API file: default titles,
        and inputs of a newer ComfyUI with their default values."""
        prompt = self.prompt()
        for id_ in prompt.keys() & shipped.keys():
            node, given = prompt[id_], shipped[id_]
            if node["class_type"].startswith("OneDiffGuard"):
                continue
            title, fresh = self._page.evaluate(FRESH, node["class_type"])
            fresh["video-preview"] = ""  # LoadVideo adds this widget with its file
            for name in node["inputs"].keys() & fresh.keys() - given["inputs"].keys():
                if node["inputs"][name] == fresh[name]:
                    del node["inputs"][name]
            if node["_meta"]["title"] == title:
                node["_meta"] = given["_meta"]
        return prompt

    def saved_values(self) -> dict[int, Any]:
        """Return the widget values of our nodes, as a file saved now would have them."""
        return values_of(self._page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))"))

    def set_widgets(self, values: Mapping[str, Any]) -> None:
        """Set widgets: {"NodeType.widget": value}."""
        self._page.evaluate(SET_WIDGETS, values)

    def attach(self, node_type: str, source: str, slot: int) -> None:
        """Wire an output of the only node of type `source` to a new node's first input."""
        self._page.evaluate(ATTACH, [node_type, source, slot])

    def count(self, selector: str) -> int:
        """Return the number of elements that match the selector."""
        return self._page.locator(selector).count()

    def text_with(self, part: str) -> str:
        """Return the visible text of the first element that contains this text."""
        return self._page.get_by_text(part).first.inner_text()

    def evaluate(self, expression: str, argument: Any = None) -> Any:
        return self._page.evaluate(expression, argument)

    def dispatch(self, event: str, **detail: Any) -> None:
        """Send the page an event as if it came from the server."""
        send = "([kind, detail]) => app.api.dispatchEvent(new CustomEvent(kind, {detail}))"
        self._page.evaluate(send, [event, detail])

    def click(self, selector: str) -> None:
        self._page.locator(selector).first.click(timeout=TIMEOUT_MS)

    def fill(self, selector: str, text: str) -> None:
        self._page.locator(selector).first.fill(text, timeout=TIMEOUT_MS)

    def settle(self) -> None:
        """Wait until the page has updated its layout."""
        self._page.wait_for_timeout(700)

    def widgets(self, node_type: str) -> dict[str, Any]:
        return self._page.evaluate(WIDGETS, node_type)

    def queue(self, command: str = "") -> tuple[str, Any]:
        """Press Run, wait, and return the final event and its details. command: used instead of Run."""
        self._page.evaluate(LISTEN, ENDS)
        self._page.evaluate(QUEUE, command)
        return self._ended()

    def click_run(self) -> tuple[str, Any]:
        """Do the same with the page's own Run button."""
        self._page.evaluate(LISTEN, ENDS)
        self._page.get_by_role("button", name="Run", exact=True).first.click(timeout=TIMEOUT_MS)
        return self._ended()

    def _ended(self) -> tuple[str, Any]:
        self._page.wait_for_function("() => window.ended", timeout=HANG_SECONDS * 1000)
        self._page.wait_for_timeout(500)
        return tuple(self._page.evaluate("() => window.ended"))

    def press_run(self) -> None:
        """Press Run without waiting, for a prompt that the server rejects."""
        self._page.evaluate("() => { app.queuePrompt(0, 1) }")

    def wait_for_text(self, text: str) -> None:
        self._page.get_by_text(text).first.wait_for(timeout=TIMEOUT_MS)

    def wait_for_node(self, node_type: str) -> None:
        """Wait until the open workflow has a node of this type."""
        has_node = "type => app.graph.nodes.some(node => node.type === type)"
        self._page.wait_for_function(has_node, arg=node_type, timeout=TIMEOUT_MS)

    def wait_for_error(self, text: str, details: str = "View details") -> None:
        """Wait until the page shows the error of a failed run. Newer pages show only the node, and the text after a
        click on `details`."""
        error, more = self._page.get_by_text(text).first, self._page.get_by_text(details).first
        error.or_(more).first.wait_for(timeout=TIMEOUT_MS)
        if more.is_visible():
            more.click()
        error.wait_for(timeout=TIMEOUT_MS)

    def wait_for_video(self) -> None:
        """Wait until a video on the page shows its first frame."""
        shown = "() => [...document.querySelectorAll('video')].some(video => video.readyState >= 2)"
        self._page.wait_for_function(shown, timeout=TIMEOUT_MS)

    def ask(self, path: str) -> Any:
        """Send a GET request from the page, and return JSON or text."""
        return self._page.evaluate(
            "async path => { const r = await fetch(path); const t = await r.text();"
            " try { return JSON.parse(t) } catch { return t } }",
            path,
        )

    @contextmanager
    def page_of_user(self, url: str, user: str) -> Iterator[Canvas]:
        """Open a multi-user server's page as one user, given by id, in a page of its own."""
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
        """Reopen the page with Nodes 2.0, or in classic mode, inside the context."""
        self.set_settings(url, VueNodes_Enabled=on)
        self.open(url)
        yield
        self.set_settings(url, VueNodes_Enabled=False)

    def picture(self, name: str) -> Path:
        path = self._pictures / f"{name}.png"
        self._page.screenshot(path=str(path))
        return path


@contextmanager
def canvas(
    url: str, pictures: Path, language: str = "en-US", window: Mapping[str, int] = MappingProxyType(WINDOW)
) -> Iterator[Canvas]:
    """Open the server's page in a new browser profile; skip the test without a browser. language: the browser's."""
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
