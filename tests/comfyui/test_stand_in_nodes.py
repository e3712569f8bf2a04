"""The stand-ins of tests/workflows for ComfyUI's own nodes, compared with the nodes of current ComfyUIs.

Shipped workflows with these nodes run in test_templates_as_seen.py, test_every_workflow_in_comfyui.py and
inside/split_workflows.py.
"""

from __future__ import annotations

import operator

import comfyui_nodes
import legs
from comfyui_onediff_guard.headless.workflow import schema

pytestmark = legs.IN_CHECKOUTS


def test_stand_in_nodes_match_comfyui_nodes(server: legs.Server) -> None:
    known = server.ask("/object_info")
    missing = comfyui_nodes.NODE_CLASS_MAPPINGS.keys() - known
    current = server.leg.is_current
    assert missing <= (set() if current else comfyui_nodes.NEWER)
    for name, node in comfyui_nodes.NODE_CLASS_MAPPINGS.items():
        if name in missing:
            continue
        ours, theirs = schema.from_class(name, node), schema.from_object_info(name, known[name])
        assert list(ours.inputs) == list(theirs.inputs), name
        assert ours.outputs == theirs.outputs[: len(ours.outputs)], name  # newer ComfyUIs add outputs
        for key, spec in ours.inputs.items():
            real = theirs.inputs[key]
            assert (spec.type, spec.required) == (real.type, real.required), f"{name}.{key}"
            for what, value in spec.config.items():
                fits = {"min": operator.ge, "max": operator.le}.get(what, operator.eq)  # and widen limits
                assert fits(value, real.config.get(what)), f"{name}.{key}: {what}"
            if key not in comfyui_nodes.FILE_INPUTS:
                newer = set() if current else comfyui_nodes.NEWER_OPTIONS
                assert set(spec.options) <= {*real.options, *newer}, f"{name}.{key}"
                assert spec.options[:1] == real.options[:1], f"{name}.{key}"
