"""The Self-Test node: whether this card computes right."""

from __future__ import annotations

from typing import Any

from ..comfyui_host import host
from . import inputs
from .node import Node
from .report import with_surroundings


class SelfTest(Node):
    """Nothing → a report of what this card computes right and wrong, as text, kept for later runs."""

    TITLE = "Self-Test"
    CATEGORY = inputs.DIAGNOSE
    SEARCH_ALIASES = [
        *(*inputs.PRECISION_WORDS, "selftest", "check GPU", "doctor", "diagnosis", "architecture", "TF32"),
        *("black image", "black video"),
    ]
    DESCRIPTION = (
        "Checks in about a minute whether this card computes correctly: matrix products, convolutions and attention in "
        "each precision, the guard's rerun, overflow protection, compiled code and offload, compared with float64. "
        "Downloads nothing. Later runs with precision or backend 'auto' avoid what failed here. The report also lists "
        "card, driver, packages, compile backends and half-precision switches."
    )
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_TOOLTIPS = ("Text: a line for each check (right or wrong), times, and what runs here and why.",)
    OUTPUT_NODE = True
    FUNCTION = "check"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "hidden": inputs.node_id()}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """Return NaN, so that it runs each time: drivers and packages change without the graph."""
        return float("nan")

    def check(self, node_id: str | None = None) -> dict[str, Any]:
        from ..pipelines.insight.diagnosis import diagnose
        from ..pipelines.selftest.checks import MEMORY, selftest
        from ..precision.self_test import keep

        placement = host.placement()
        placement.make_room(MEMORY)
        with host.Progress(0, node_id) as progress:
            result = selftest(placement.device, lambda name, done, total: progress.update(done, name, total))
        file = host.selftest_directory() / f"{result.key}.json"
        try:
            kept = f"Kept in {keep(result, file)}."
        except OSError as error:
            kept = f"It could not be kept in {file}: {error.strerror or error}."
        *lines, verdict = result.in_words().splitlines()  # a node shows the first lines, a terminal the last
        here = with_surroundings(diagnose(selftests=host.selftest_directory())).text()
        text = "\n".join([verdict, kept, "", *lines, "", here])
        host.say(node_id, text, as_it_is=True)
        return {"ui": {"text": [text], "onediff_guard": [result.as_dict()]}, "result": (text,)}
