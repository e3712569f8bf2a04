"""What an input is that a prompt leaves out."""

from __future__ import annotations

import inspect

from comfyui_onediff_guard import NODE_CLASS_MAPPINGS


def test_an_input_that_is_left_out_has_the_value_that_its_widget_begins_with() -> None:
    """Of prompts through the API, in which nobody fills in what an optional input would hold."""
    for name, cls in NODE_CLASS_MAPPINGS.items():
        takes = inspect.signature(getattr(cls, cls.FUNCTION)).parameters
        if cls.FUNCTION == "load":
            takes = inspect.signature(cls.open).parameters
        for key, (kind, *options) in cls.INPUT_TYPES().get("optional", {}).items():
            if key not in takes or not options or "default" not in options[0]:
                continue
            assert takes[key].default == options[0]["default"], (name, key, kind)
