"""ComfyUI's own templates: its page and the headless reader make the same graph of each file.

The files are in the leg's environment (package comfyui-workflow-templates). The tests compare all inputs of the leg's
node types; no node reads the other values that the page sends.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser
import legs
import pytest
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, ui_format
from comfyui_onediff_guard.headless.workflow.schema import Schema
from comfyui_onediff_guard.headless.workflow.ui_file import UiFile, unfold
from comfyui_onediff_guard.trust.foreign import fitting
from tiers import by_tier

pytestmark = legs.IN_CHECKOUTS

FEW = 40  # templates in the smaller tiers
PURELIB = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


@pytest.fixture(scope="module")
def templates(server: legs.Server) -> list[Path]:
    asked = subprocess.run([str(server.leg.python), "-c", PURELIB], capture_output=True, text=True, check=True)
    found = sorted(
        path
        for path in Path(asked.stdout.strip()).glob("comfyui_workflow_templates*/**/*.json")
        if path.parent.name == "templates" and "nodes" in json.loads(path.read_text(encoding="utf-8"))
    )
    if not found:
        pytest.skip("the leg's environment has no comfyui-workflow-templates")
    return found[:: by_tier(1, len(found) // FEW or 1)]


@pytest.fixture(scope="module")
def schemas(server: legs.Server) -> dict[str, Schema]:
    return {name: schema.from_object_info(name, info) for name, info in server.ask("/object_info").items()}


def test_page_and_headless_reader_make_same_graph(
    canvas: browser.Canvas,
    templates: list[Path],
    schemas: dict[str, Schema],
    figure: Callable[[str, object], None],
) -> None:
    differing: dict[str, list[str]] = {}
    compared = unfolded = 0
    for path in templates:
        data = json.loads(path.read_text(encoding="utf-8"))
        kinds = types_of(data)
        if kinds is None or kinds - set(schemas):
            continue
        ours = ui_format.convert(data, schemas).to_api()
        canvas.load(data)
        page = canvas.prompt()
        if renamed(data) - page.keys() == renamed(data) != set():
            continue  # pages of 2025 do not rename duplicate ids
        compared += 1
        faults = differences(ours, page, schemas)
        unfolded += any(":" in node_id for node_id in ours)
        if faults:
            differing[path.stem] = faults
    equal = f"{compared - len(differing)} of {compared} equal"
    figure("templates of ComfyUI: the page's graph and the reader's", equal)
    figure(
        "templates of ComfyUI: left out (node types that the leg lacks, what the page alone makes, ids that it leaves)",
        len(templates) - compared,
    )
    figure("templates of ComfyUI: with subgraphs among them", unfolded)
    assert not differing, json.dumps(differing, indent=1)[:5000]
    assert unfolded


def test_server_answer_is_same_with_guard_every_workflow(
    server: legs.Server, templates: list[Path], schemas: dict[str, Schema], figure: Callable[[str, object], None]
) -> None:
    differing: dict[str, Any] = {}
    guarded, asked, taken = 0, 0, list[float]()
    for path in templates:
        data = json.loads(path.read_text(encoding="utf-8"))
        kinds = types_of(data)
        if kinds is None or kinds - set(schemas):
            continue
        prompt = ui_format.convert(data, schemas).to_api()
        logged = server.count("Guard every workflow: ")
        answers = [answer_to(server, prompt, switch) for switch in (False, True)]
        asked += 1
        if server.count("Guard every workflow: ") > logged:
            guarded += 1
            *_, milliseconds = re.findall(r"added \d+ guards \(\w+\) in ([\d.]+) ms", server.log_text())
            taken.append(float(milliseconds) / len(prompt) * 100)
        if answers[0] != answers[1]:
            differing[path.stem] = answers
    figure("templates of ComfyUI: the server's answer with guards and without", f"{asked - len(differing)} of {asked}")
    figure("templates of ComfyUI: guarded among them", guarded)
    # the median: another thread delays a few of them
    figure("templates of ComfyUI: milliseconds for guards in 100 nodes", round(statistics.median(taken), 2))
    assert not differing, json.dumps(differing, indent=1)[:5000]
    assert guarded > asked / 2


def answer_to(server: legs.Server, prompt: dict[str, Any], switch: bool) -> Any:
    """Return the server's answer to a prompt, and remove the prompt before it runs."""
    try:
        answer = server.ask("/prompt", {"prompt": prompt, "extra_data": {"onediff_guard": switch}})
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())
    server.ask("/queue", {"delete": [answer["prompt_id"]]})
    server.ask("/interrupt", {"prompt_id": answer["prompt_id"]})
    return 200, answer["node_errors"]


def types_of(data: dict[str, Any]) -> set[str] | None:
    """Return the node types; None if a node's input is made on the page: 3D views, recorded sound."""
    try:
        return ui_format.types_in(data)[0]
    except WorkflowError as refused:
        if not any(f"'{kind}'" in str(refused) for kind in ui_format.RECORDERS):
            raise
        return None


def renamed(data: dict[str, Any]) -> set[str]:
    """Return the ids of subgraph nodes that are renamed, because another node in the file has the same id."""
    unfolded = unfold(fitting(UiFile, data))
    return {
        f"{level.path}{level.canvas.renamed[name]}"
        for level in unfolded.levels.values()
        for name in level.canvas.renamed
    }


def differences(ours: Any, page: Any, schemas: dict[str, Schema]) -> list[str]:
    """Return the differences between two graphs in API format."""
    found = [f"only one has node {node_id}" for node_id in ours.keys() ^ page.keys()]
    for node_id in ours.keys() & page.keys():
        kind, mine, theirs = ours[node_id]["class_type"], ours[node_id]["inputs"], page[node_id]["inputs"]
        known = schemas[kind].inputs_with(theirs)
        found += [
            f"{node_id}.{name} ({kind}): {mine.get(name, '-')}, page: {theirs.get(name, '-')}"[:300]
            for name in mine.keys() | {name for name in theirs if name in known}
            if mine.get(name, "-") != theirs.get(name, "-")
        ]
    return found
