"""Draw workflows/NAME.jpg, a workflow's picture in ComfyUI's template browser: its input, its output, its model, and
whether it has a guard node.

    python scripts/template_pictures.py
"""

from __future__ import annotations

import json
import re
import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon
from PIL import Image
from registry_pictures import NIGHT, PAPER, canvas, shield

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / "workflows"
COLOURS = {  # model → sky and hills of its pictures
    "CogVideoX 2B": ("#a9d8c8", "#30597a"),
    "CogVideoX 5B": ("#8fc7e8", "#2f6b5e"),
    "CogView3-Plus": ("#f6d57a", "#8a4b3c"),
    "CogView4": ("#f3e3b0", "#8c6239"),
    "Flux.2": ("#ffd9a0", "#5a3f78"),
    "LTX-2.3": ("#ffb37a", "#3a4a78"),
    "MiniMax H3": ("#f7a8b8", "#4a2f5e"),
    "Qwen-Image": ("#e7b8ff", "#58307a"),
    "SD 1.5": ("#ffd2c2", "#7a3b3b"),
    "SVD": ("#c4b8f0", "#3d3a6e"),
    "Wan 2.1": ("#9fe0dc", "#1f5f6b"),
    "Wan 2.2 14B": ("#8fdcd0", "#245a7a"),
    "Z-Image": ("#b9efb0", "#2f6d3a"),
}
PROMPTS = ("OneDiffGuardEncodePrompt", "CLIPTextEncode", "MiniMaxH3ImageToVideo")
LORA = ("#f2c3d7", "#6b4a7d")  # replaces the model's colours
TITLE = re.compile(r"(?P<model>.+?)(?P<native> native)? (?P<starts>text|image|video) to (?P<makes>image|video)\b")
CARD = 1.46  # side of a card; the picture's side is 4
ROUND = "round,pad=0,rounding_size=0.12"


class Workflow(NamedTuple):
    model: str
    sky: str
    hills: str
    starts: str  # text, image or video
    makes: str  # image or video
    prompt: str
    guard: bool
    lora: bool
    native: bool


def read(path: Path) -> Workflow:
    """Return the content of a shipped workflow's picture."""
    title = TITLE.match(path.stem)
    assert title, f"{path.name} does not say what goes in and what comes out"
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    kinds = {node["type"] for node in nodes}
    prompts = [node["widgets_values"][0] for node in nodes if node["type"] in PROMPTS]
    lora = "OneDiffGuardLoadLoRA" in kinds
    return Workflow(
        title["model"],
        *(LORA if lora else COLOURS[title["model"]]),
        starts=title["starts"],
        makes=title["makes"],
        prompt=next(iter(prompts), ""),
        guard=any("NaNGuard" in kind for kind in kinds),
        lora=lora,
        native=bool(title["native"]),
    )


def scene(axes: Any, left: float, bottom: float, workflow: Workflow, hour: float, zorder: int) -> None:
    """Draw a landscape in a square. hour: position of the sun, 0 to 1."""
    box = FancyBboxPatch((left, bottom), CARD, CARD, boxstyle=ROUND, fc=workflow.sky, ec=PAPER, lw=3, zorder=zorder)
    axes.add_patch(box)
    x = np.linspace(0, 1, 60)
    sun = Polygon(
        np.column_stack([np.cos(x * 2 * np.pi), np.sin(x * 2 * np.pi)]) * 0.17
        + (left + CARD * (0.2 + 0.6 * hour), bottom + CARD * (0.6 + 0.22 * np.sin(np.pi * hour))),
        fc="#fff6d8",
        zorder=zorder + 0.1,
    )
    shapes = [sun]
    for depth, (height, alpha) in enumerate([(0.46, 0.55), (0.3, 1.0)]):
        ridge = height + 0.1 * np.sin(5 * x + 2.3 * depth) + 0.05 * np.sin(13 * x + depth)
        outline = np.column_stack([left + x * CARD, bottom + ridge * CARD])
        corners = [(left + CARD, bottom), (left, bottom)]
        shapes.append(Polygon([*outline, *corners], fc=workflow.hills, alpha=alpha, zorder=zorder + 0.2 + depth / 10))
    for shape in shapes:
        axes.add_patch(shape)
        shape.set_clip_path(box)


def film(axes: Any, left: float, bottom: float, workflow: Workflow) -> None:
    """Draw three pictures behind each other, and a play sign."""
    for n in (2, 1, 0):
        scene(axes, left + 0.13 * n, bottom + 0.13 * n, workflow, 0.15 + 0.35 * n, zorder=10 - 3 * n)
    x, y = left + CARD / 2, bottom + CARD / 2
    sign = [(x - 0.2, y - 0.26), (x - 0.2, y + 0.26), (x + 0.28, y)]
    axes.add_patch(Polygon(sign, fc=PAPER, ec=NIGHT, lw=2, zorder=12))


def page(axes: Any, left: float, bottom: float, text: str) -> None:
    axes.add_patch(FancyBboxPatch((left, bottom), CARD, CARD, boxstyle=ROUND, fc=PAPER, ec="none"))
    lines = "\n".join(textwrap.wrap(text, 15)[:6])
    axes.text(left + 0.1, bottom + CARD - 0.14, f"{lines} …", color=NIGHT, size=10.5, va="top", linespacing=1.4)


def picture(workflow: Workflow) -> Figure:
    figure, axes = canvas(4, 4)
    left, right, bottom = 0.13, 2.15, 2.06
    if workflow.starts == "text":
        page(axes, left, bottom, workflow.prompt)
    elif workflow.starts == "image":
        scene(axes, left, bottom, workflow, 0.15, zorder=5)
    else:
        film(axes, left, bottom, workflow._replace(sky="#9aa4ad", hills="#4b5560"))
    if workflow.makes == "video":
        film(axes, right, bottom, workflow)
    else:
        scene(axes, right + 0.12, bottom, workflow, 0.7, zorder=5)
    if workflow.guard:
        shield(axes, 2.0, 1.5, 0.4)
    else:
        arrow = FancyArrowPatch((1.55, 1.5), (2.45, 1.5), arrowstyle="-|>", mutation_scale=28, color=PAPER, lw=4)
        axes.add_patch(arrow)
    title = workflow.model + (" + LoRA" if workflow.lora else "")
    what = f"{workflow.starts} to {workflow.makes}"
    extra = "ComfyUI's own nodes" if workflow.native else ""
    large = 24 if len(title) < 18 else 21  # points
    for y, text, colour, size in ((0.8, title, PAPER, large), (0.46, what, PAPER, 18), (0.17, extra, workflow.sky, 14)):
        weight = "bold" if text is title else "normal"
        axes.text(2, y, text, color=colour, size=size, weight=weight, ha="center", va="center")
    return figure


def main() -> None:
    for path in sorted(WORKFLOWS.glob("*.json")):
        drawn = BytesIO()
        with mpl.rc_context({"font.family": "DejaVu Sans"}):
            picture(read(path)).savefig(drawn, format="png", dpi=100)
        Image.open(drawn).convert("RGB").save(path.with_suffix(".jpg"), quality=88, optimize=True)


if __name__ == "__main__":
    main()
