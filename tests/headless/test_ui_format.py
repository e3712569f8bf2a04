"""UI-format workflows are converted as ComfyUI's page converts them: widgets, links, prompts, file names."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch.content import content_of
from comfyui_onediff_guard.headless.batch.jobs import Job, JobsFile
from comfyui_onediff_guard.headless.errors import UnknownNodesError, WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, settings, ui_format, ui_texts
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link
from comfyui_onediff_guard.headless.workflow.settings import Setting
from comfyui_onediff_guard.headless.workflow.ui_file import UiNode
from comfyui_onediff_guard.trust.foreign import fitting
from waiting import no_hang

Json = dict[str, Any]
PROMPT = ["STRING", {"multiline": True, "dynamicPrompts": True}]
SIZES = {"width": ["INT", {"default": 512}], "height": ["INT", {"default": 512}]}
CONTROLLED = ["INT", {"control_after_generate": True}]


def info(required: Json, output: list[str] | None = None, **optional: Any) -> Json:
    return {"input": {"required": required, "optional": optional}, "output": output or []}


INFO: Json = {
    "Noise": info(
        {
            "width": ["INT", {"default": 32}],
            "seed": CONTROLLED,
            "kind": [["uniform", "nan"]],
            "text": ["STRING", {"multiline": True}],
        },
        ["IMAGE", "STRING"],
        gain=["FLOAT", {"default": 1.0}],
        mask=["MASK"],
    ),
    "Encode": info({"text": PROMPT, "clip": ["CLIP", {}]}, ["CONDITIONING"], note=["STRING", {}]),
    "Empty": info({**SIZES, "batch": ["INT", {"default": 1}], "color": ["INT", {}]}, ["IMAGE"])
    | {"display_name": "Empty Image"},
    "Sampler": info({"seed": CONTROLLED, "image": ["IMAGE", {}]}, ["IMAGE"]),
    "Words": info({"value": ["STRING", {}]}, ["STRING"]),
    "Picky": info({"images": ["IMAGE"], "number": ["INT", {}]}, ["IMAGE"]),
    "SaveImage": info({"images": ["IMAGE", {}], "filename_prefix": ["STRING", {"default": "x"}]}),
    "SaveText": info(
        {"text": ["STRING", {"forceInput": True}], "filename_prefix": ["STRING", {}], "format": [["txt", "md"], {}]}
    ),
    "Sockets": info(
        {
            "strength": ["FLOAT", {"forceInput": True}],
            "steps": ["INT", {"default": 20}],
            "seed": CONTROLLED,
            "image": ["IMAGE", {"forceInput": True}],
        },
        scale=["FLOAT", {"defaultInput": True}],
        last=["FLOAT", {"default": 1.0}],
    ),
    "Switch": info({}, ["IMAGE"], image=["IMAGE"]),
    "Shown": info({}, image=["IMAGE"]) | {"output_node": True},
    "Upscale": info({"upscale_model": ["UPSCALE_MODEL", {}], "image": ["IMAGE", {}]}, ["IMAGE"]),
    "UpscaleLoader": info({"name": [["a.pth"], {}]}, ["UPSCALE_MODEL"]),
    "VHS_VideoCombine": info(
        {
            "images": ["IMAGE", {}],
            "frame_rate": ["FLOAT", {"default": 8}],
            "filename_prefix": ["STRING", {"default": "AnimateDiff"}],
            "format": [["image/gif", "video/h265-mp4"], {}],
        }
    ),
    "Camera": info({"image": ["WEBCAM", {}]}, ["IMAGE"]),
}
SCHEMAS = {name: schema.from_object_info(name, each) for name, each in INFO.items()}
NOON = datetime(2026, 3, 5, 7, 8, 9)


def node(node_id: int, kind: str, widgets: Any = None, inputs: Any = (), outputs: Any = (), **more: Any) -> Json:
    slots = [{"name": name, "type": type_, "link": link} for name, type_, link in inputs]
    made = [{"type": type_} for type_ in outputs]
    return {"id": node_id, "type": kind, "inputs": slots, "outputs": made, "widgets_values": widgets, **more}


def noise(node_id: int = 1, *inputs: Any, **more: Any) -> Json:
    return node(node_id, "Noise", [48, 7, "randomize", "nan", "a cat", 0.5], inputs, ["IMAGE", "STRING"], **more)


def empty(node_id: int = 1, widgets: Any = (64, 32, 1, 0), **more: Any) -> Json:
    return node(node_id, "Empty", list(widgets), (), ["IMAGE"], **more)


def save(link: int | None = None, prefix: str = "x", node_id: int = 2) -> Json:
    return node(node_id, "SaveImage", [prefix], [("images", "IMAGE", link)])


def link(number: int, origin: int, target: int, slot: int = 0) -> Json:
    return {"id": number, "origin_id": origin, "origin_slot": slot, "target_id": target, "target_slot": 0, "type": "*"}


def convert(nodes: list[Json], *links: Any, **more: Any) -> Graph:
    data = {"nodes": nodes, "links": list(links), **more}
    types = set[str]().union(*ui_format.types_in(data))
    return ui_format.convert(data, {name: SCHEMAS[name] for name in types & SCHEMAS.keys()})


# Widgets

CAT = {"width": 48, "seed": 7, "kind": "nan", "text": "a cat", "gain": 0.5}
DEFAULTS = {"width": 32, "seed": 0, "kind": "uniform", "text": "", "gain": 1.0}


@pytest.mark.parametrize(
    ("kind", "widgets", "expected"),
    [
        ("Noise", [48, 7, "randomize", "nan", "a cat", 0.5], CAT),
        ("Noise", [48, 7, "nan", "a cat", 0.5], CAT),
        ("Noise", [48, 7, True, "nan", "a cat", 0.5], CAT),  # the control of a seed in the oldest files
        ("Noise", [48, 7, "fixed"], {**DEFAULTS, "width": 48, "seed": 7}),
        ("Noise", None, DEFAULTS),
        ("Noise", {"width": 48, "videopreview": {}}, {**DEFAULTS, "width": 48}),
        ("SaveText", ["", "notes/today", "md"], {"filename_prefix": "notes/today", "format": "md"}),
        ("SaveText", ["notes/today", "md"], {"filename_prefix": "notes/today", "format": "md"}),
        # strength, steps, seed and its control, image, scale, last: old files have values for sockets, too
        ("Sockets", [49, 30, 7, "fixed", None, 2.0, 0.5], {"steps": 30, "seed": 7, "last": 0.5}),
        ("Sockets", [30, 7, "fixed", 0.5], {"steps": 30, "seed": 7, "last": 0.5}),
        (
            "VHS_VideoCombine",  # whose pack adds widgets by format
            {"format": "video/h265-mp4", "crf": 11, "choose video to upload": "image", "images": 5},
            {"frame_rate": 8, "filename_prefix": "AnimateDiff", "format": "video/h265-mp4", "crf": 11},
        ),
    ],
)
def test_widget_values_are_assigned_to_inputs(kind: str, widgets: Any, expected: Json) -> None:
    graph = convert([node(1, kind, widgets)])
    assert graph.nodes["1"].inputs == expected
    assert graph.workflow is not None


def test_float_numbers_and_list_links_are_accepted() -> None:
    """As some tools write them: every number a float, `extra` a list, and links as lists."""
    nodes = [noise(), save(1), noise(3, mode=2)]
    floats = json.loads(json.dumps([nodes, [1, 1, 0, 2, 0, "IMAGE"]]), parse_int=float)
    assert "1.0" in repr(floats)
    graph = convert(*floats, extra=[])
    assert set(graph.nodes) == {"1", "2"}
    assert graph.nodes["2"].inputs == {"filename_prefix": "x", "images": Link("1", 0)}


def test_linked_widget_keeps_positions_of_other_widgets() -> None:
    target = noise(1, ("text", "STRING", 6), ("width", "INT", None))
    graph = convert([target, noise(3), save(5)], link(5, 1, 2), link(6, 3, 1, 1))
    assert graph.nodes["1"].inputs == {**CAT, "text": Link("3", 1)}


def test_infinity_is_saved_as_null_in_workflow() -> None:
    graph = convert([noise(), save(5)], link(5, 1, 2), config={"scale": math.inf})
    assert graph.workflow and graph.workflow["config"] == {"scale": None}


# Links


def upscale(mode: int = 4, model: int = 2, image: int = 1, outputs: Any = ("IMAGE",), node_id: int = 6) -> Json:
    inputs = [("upscale_model", "UPSCALE_MODEL", model), ("image", "IMAGE", image)]
    return node(node_id, "Upscale", [], inputs, outputs, mode=mode)


def reroute(node_id: int, link_id: int, mode: int = 0, kind: str = "Reroute") -> Json:
    return node(node_id, kind, None, [("", "*", link_id)], ["*"], mode=mode)


def set_node(node_id: int, name: Any, link_id: int | None, **more: Any) -> Json:
    return node(node_id, "SetNode", [name], [("IMAGE", "IMAGE", link_id)], ["*"], **more)


def get_node(node_id: int, name: Any, **more: Any) -> Json:
    return node(node_id, "GetNode", [name], (), ["IMAGE"], **more)


LOADER = node(5, "UpscaleLoader", ["a.pth"], (), ["UPSCALE_MODEL"])
BYPASSED = [empty(), LOADER, upscale()]
MANY = [("model", "UPSCALE_MODEL", 2), *((f"mask{n}", "MASK", None) for n in range(130)), ("image", "IMAGE", 1)]
WIDE = [empty(), LOADER, node(6, "OfAPack", None, MANY, ["IMAGE"], mode=4)]
ANY_PART = [("model", "UPSCALE_MODEL", 2), ("any", "LATENT,*", 1)]
LONG = [reroute(n, n) for n in range(100, 1300)], [link(100, 1, 100), *(link(n, n - 1, n) for n in range(101, 1300))]
NO_IMAGE = node(6, "Words", ["x"], [("value", "STRING", None)], ["IMAGE"], mode=4)
SET, GET = [empty(), set_node(3, "pic", 1)], [get_node(4, "pic")]
FEEDS, FEED = [link(1, 1, 6), link(2, 5, 6)], [link(1, 1, 3)]


@pytest.mark.parametrize(
    ("between", "links", "source", "found"),
    [
        ([empty()], [], 1, True),
        ([empty(mode=2)], [], 1, False),
        ([empty(), reroute(7, 3), reroute(8, 4)], [link(3, 1, 7), link(4, 7, 8)], 8, True),
        ([empty(), reroute(7, 3, mode=4)], [link(3, 1, 7)], 7, True),
        ([empty(), reroute(7, 3, mode=2)], [link(3, 1, 7)], 7, False),
        # a bypassed node passes on the requested type, also behind other nodes
        (BYPASSED, FEEDS, 6, True),
        ([*BYPASSED, reroute(7, 3)], [*FEEDS, link(3, 6, 7)], 7, True),
        ([*BYPASSED, reroute(7, 3, kind="Reroute (rgthree)")], [*FEEDS, link(3, 6, 7)], 7, True),
        ([*BYPASSED, reroute(7, 3), reroute(8, 4)], [*FEEDS, link(3, 6, 7), link(4, 7, 8)], 8, True),
        ([*BYPASSED, set_node(7, "pic", 3), get_node(8, "pic")], [*FEEDS, link(3, 6, 7)], 8, True),
        (
            [*BYPASSED, reroute(7, 3), upscale(model=4, image=5, node_id=9)],
            [*FEEDS, link(3, 6, 7), link(5, 7, 9), link(4, 5, 9)],
            9,
            True,
        ),
        (WIDE, FEEDS, 6, True),
        ([empty(), LOADER, node(6, "OfAPack", None, ANY_PART, ["IMAGE"], mode=4)], FEEDS, 6, True),
        ([*BYPASSED, reroute(7, 3, mode=4)], [*FEEDS, link(3, 6, 7)], 7, "5"),  # which requests any type: a model
        ([NO_IMAGE], [], 6, False),
        ([empty(), *LONG[0]], LONG[1], 1299, True),
        # KJNodes: a Get node reads the Set node of the same name
        ([*SET, *GET], FEED, 4, True),
        ([*GET, *reversed(SET)], FEED, 4, True),
        ([empty(), set_node(3, "pic", 1, mode=2), *GET], FEED, 4, True),  # a muted Set node still sets
        (SET, FEED, 3, True),  # from the Set node itself
        ([*SET, get_node(5, "pic"), set_node(6, "two", 2), get_node(4, "two")], [*FEED, link(2, 5, 6)], 4, True),
        ([*SET, set_node(5, "pic", 2)], FEED, 1, True),  # two Set nodes of one name, neither is read
        ([empty(mode=2), set_node(3, "pic", 1), *GET], FEED, 4, False),
        *(([*SET, get_node(4, name)], FEED, 4, False) for name in ("other", "", 5, ["pic"])),
        ([*SET, get_node(4, "pic", mode=2)], FEED, 4, False),
        ([empty(), set_node(3, "None", 1), get_node(4, None)], FEED, 4, False),
        ([empty(), set_node(3, "pic", None), *GET], [], 4, False),
    ],
)
def test_input_is_linked_to_source_at_end_of_chain(
    between: list[Json], links: list[Any], source: int, found: bool | str
) -> None:
    graph = convert([*between, save(99), node(20, "Note", ["hi"])], *links, link(99, source, 2))
    expected = Link("1" if found is True else str(found), 0) if found else None
    assert graph.nodes["2"].inputs.get("images") == expected
    assert {each.class_type for each in graph.nodes.values()} <= {"Empty", "SaveImage", "UpscaleLoader"}


def test_inputs_behind_one_reroute_get_source_of_their_type() -> None:
    target = upscale(0, model=8, image=9, node_id=3)
    nodes = [empty(), LOADER, upscale(outputs=["*"]), reroute(7, 3), target]
    graph = convert(nodes, *FEEDS, link(3, 6, 7), link(8, 7, 3), link(9, 7, 3))
    assert graph.nodes["3"].inputs == {"upscale_model": Link("5", 0), "image": Link("1", 0)}


def test_primitive_sets_direct_target_but_none_behind_bypassed_node() -> None:
    primitive, bypassed = node(3, "PrimitiveNode", [24]), node(6, "Words", ["x"], [("value", "STRING", 1)], ["STRING"])
    targets = [noise(1, ("width", "INT", 2)), node(2, "Encode", ["x"], [("text", "STRING", 3)])]
    links = [link(1, 3, 6), link(2, 3, 1), link(3, 6, 2)]
    graph = convert([primitive, bypassed | {"mode": 4}, *targets], *links)
    assert (graph.nodes["1"].inputs["width"], graph.nodes["2"].inputs["text"]) == (24, "x")


# Invalid workflows


@pytest.mark.parametrize(
    ("nodes", "links", "message"),
    [
        ([save(5)], [], "Link 5 of the workflow has no source node"),
        ([save(5)], [link(5, 77, 2)], "Link 5 of the workflow has no source node"),
        ([save(5)], [[5]], r"links\[0\].origin_id is missing"),
        ([{"id": 1}], [], r"nodes\[0\].type is missing"),
        ([reroute(3, 5), save(5)], [link(5, 3, 3)], "form a cycle"),
        ([set_node(3, "pic", 1), *GET, save(9)], [link(1, 4, 3), link(9, 4, 2)], "form a cycle"),
        (
            [*SET, set_node(5, "pic", 2), *GET, save(9)],
            [*FEED, link(2, 1, 5), link(9, 4, 2)],
            r"Node 4 gets 'pic', but 2 Set nodes set it\. Rename",
        ),
        *(
            ([noise() | change, save(5)], [link(5, 1, 2)], message)
            for change, message in (
                ({"id": "2"}, "Two nodes of the workflow have the id 2"),
                ({"id": []}, r"nodes\[0\].id is \[\]: input should be a valid string"),
                ({"title": 5}, r"nodes\[0\].title is 5"),
                ({"type": None}, r"nodes\[0\].type is None"),
                ({"inputs": [{"link": 5}]}, r"nodes\[0\].inputs\[0\].name is missing"),
                ({"inputs": [{"name": "text", "link": True}]}, r"nodes\[0\].inputs\[0\].link is True"),
                ({"widgets_values": "text"}, "widgets_values.* is text: input should be a valid list"),
                ({"widgets_values": [math.inf]}, "is inf: input should be a finite number"),
                ({"mode": 4, "outputs": None}, "A link uses output 0 of node 1, which has 0"),
            )
        ),
        # nodes of the browser
        ([node(1, "Load3D", ["a.glb", "", "", "clear", "", 1024, 768])], [], "Node 1 is a 'Load3D', whose images"),
        ([node(1, "Camera", [""])], [], "Node 1 is a 'Camera', whose images"),
        (
            [node(1, "Label (rgthree)")],
            [],
            r"Node 1 is a 'Label \(rgthree\)', which only the browser has\. In ComfyUI, use .* Export \(API\)",
        ),
        ([noise(), node(2, "Seed Everywhere", [5, "fixed"])], [], "Node 2 is a 'Seed Everywhere', whose links the bro"),
        (
            [node(1, "Switch", [{}, {"type": "header"}, {"on": True, "lora": "a.safetensors"}, ""])],
            [],
            r"Node 1 is a 'Switch', with values whose names only the browser knows: {'on': True, 'lora': 'a\.",
        ),
        ([node(1, "OfAPack")], [], "no node type OfAPack. Install its pack there. If only"),
        ([node(1, "workflow/two images")], [], "Node 1 is a group node.*save it again: that turns it into a subgraph"),
        ([node(1, "workflow>mine")], [], r"Node 1 is a group node.*Export \(API\)"),
    ],
)
def test_invalid_workflow_is_rejected_with_location(nodes: list[Json], links: list[Any], message: str) -> None:
    with pytest.raises(WorkflowError, match=message) as refused:
        convert(nodes, *links)
    assert isinstance(refused.value, UnknownNodesError) == ("no node type" in message)


def test_browser_only_nodes_are_accepted_if_muted_or_linked() -> None:
    assert not convert([node(n, kind, mode=2) for n, kind in enumerate(["Label (rgthree)", "Load3D", "Camera"])]).nodes
    assert convert([node(1, "Switch", [{}, ""]), node(2, "Shown", [[{"url": "/view"}]])]).nodes.keys() == {"1", "2"}
    linked = node(2, "Camera", [""], [("image", "IMAGE", 1)])
    assert convert([empty(), linked], link(1, 1, 2)).nodes["2"].inputs == {"image": Link("1", 0)}


# Prompts


def sent(text: str, seed: int = 1) -> str:
    """The text that an encoder gets beside a sampler of this seed."""
    graph = convert([node(1, "Encode", [text]), node(2, "Sampler", [seed, "randomize"])])
    return graph.nodes["1"].inputs["text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a {red|red} boat", "a red boat"),
        ("a {red|{red|red}} boat", "a red boat"),
        ("{a|a}{b|b}{}", "ab"),
        ("{|} {one}", " one"),
        ("a {boat} at {sea", "a boat at sea"),
        ("a } b | c", "a } b | c"),
        (r"\{a\|b\} {c\|d|c\|d}", "{a|b} c|d"),
        # an option loses one backslash before a brace for each choice around it
        (r"\\{a} {\{|\{} {\\\{|\\\{} {{\\\{}}", r"\\a { \{ {"),
        ("ends in \\", "ends in \\undefined"),
        ("a boat /* old\none */ at sea // harbour\nat noon", "a boat  at sea \nat noon"),
        ("see http://a.example/b\nhere", "see http:\nhere"),
        ("a /* b // c", "a /* b "),
        ("a /*/ b */ c", "a  c"),
        ("{a//|b}\n}", "a\n"),
        ("a // b\u2028c", "a \u2028c"),
        ("{" * 100 + "a", "a"),
    ],
)
def test_prompt_comments_are_removed_and_choices_made(text: str, expected: str) -> None:
    assert sent(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{" * 101, "nested more than 100 deep"),
        ("a \ud83d cat", r"node 1 \(Encode\): input 'text' holds half a character"),
    ],
)
def test_invalid_prompts_are_rejected(text: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        sent(text)


def test_texts_that_are_not_prompts_stay_unchanged() -> None:
    stays = "{a|b} // c"
    graph = convert([node(1, "Encode", ["x", stays]), node(3, "Words", [stays]), node(4, "SaveText", [stays, "md"])])
    values = [value for each in graph.nodes.values() for value in each.inputs.values()]
    assert values == ["x", stays, stays, stays, "md"]


def test_prompt_choices_depend_on_final_seed() -> None:
    text = "{" + "|".join(map(str, range(1000))) + "}"
    assert sent(text) == sent(text)
    assert len({sent(text, seed) for seed in range(20)}) > 10
    graph = convert([node(1, "Encode", [text]), node(3, "Encode", [text]), node(2, "Sampler", [1, "randomize"])])
    assert graph.nodes["1"].inputs != graph.nodes["3"].inputs

    def made(*changes: str) -> Any:
        return settings.apply(graph, list(map(Setting.parse, changes)), SCHEMAS).nodes["1"].inputs["text"]

    assert made("2.seed=5") == sent(text, 5)
    assert made("1.text={a|b}") == "{a|b}"  # unchanged
    linked = [node(1, "Encode", [text]), node(2, "Sampler", [1, "fixed"], [("seed", "INT", 9)])]
    by_source = {
        convert([*linked, empty(3, (seed, 1, 1, 1))], link(9, 3, 2)).nodes["1"].inputs["text"] for seed in range(9)
    }
    assert len(by_source) > 4


# File names


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOON

    monkeypatch.setattr(ui_texts, "datetime", Clock)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("%date:yyyy-MM-dd%/run", "2026-03-05/run"),
        ("%date:yyyy-MM-dd-hhmmss%", "2026-03-05-070809"),
        ("%date:yy_M_d h m s yyy y%", "26_3_5 7 8 9 yyy y"),
        ("%date:hh.mm%", "%date:hh.mm%"),  # two parts: a node named "date:hh"
        ("%date:yyyy.MM.dd%", "2026"),
        ("%date%_%year%_%width%", "%date%_%year%_%width%"),
        ("%Folder.value%/%Empty.width%", "my set/64"),
        ("%Empty Image.height%", "32"),  # by the default title
        ("%Muted.value%_%Words.value%", "a_b_my set"),
        ("%Titled.width%", "1"),  # the first of two
        ("%Empty.nothing%_%Nobody.width%_%%_100%", "%Empty.nothing%_%Nobody.width%_%%_100%"),
        ("%Odd.value%", "a_b_c__ d"),
        ("%Note.text%-%Primitive.value%", "hello-%Empty.height%"),
        ("%Inside.width%", "7"),
        ("%Red.width%", "%Red.width%"),  # of a pack that is not installed
        ("%Picky.number%_%Off.width%_%My box.size%", "4_8_9"),  # all muted: no other node has their types
        ("%Fed.value%", "fox"),  # set by a primitive
    ],
)
@pytest.mark.usefixtures("noon")
def test_file_name_patterns_are_filled_in(prefix: str, expected: str) -> None:
    inside = {"id": "s", "nodes": [empty(9, (7, 7, 1, 0), title="Inside", properties={"Node name for S&R": "In"})]}
    nodes = [
        empty(),
        save(1, prefix),
        node(3, "Words", ["my set"], title="Folder"),
        node(4, "Words", ["a/b"], mode=2, title="Muted"),
        empty(5, (1, 2, 1, 0), title="Titled", mode=4),
        empty(6, (2, 2, 1, 0), title="Titled"),
        node(7, "Words", ['a?b"c\n\t d'], title="Odd"),
        node(8, "Note", ["hello"], title="Note"),
        node(10, "PrimitiveNode", ["%Empty.height%", "fixed"], title="Primitive"),
        node(11, "s"),
        node(12, "OfAPack", [1], mode=2, title="Red"),
        node(13, "Picky", [4], mode=2),
        node(14, "box", [9], [("size", "INT", None)], mode=2),
    ]
    sized = node(21, "Noise", [8, 7, "fixed", "nan", "", 1], [("width", "INT", None), ("seed", "INT", 1)], title="Off")
    fed = [node(22, "Words", ["x"], [("value", "STRING", 2)], title="Fed"), node(23, "PrimitiveNode", ["fox"])]
    ports = [{"name": "size", "linkIds": [1]}]
    box = {"id": "box", "name": "My box", "nodes": [sized, *fed], "links": [link(1, -10, 21), link(2, 23, 22)]}
    graph = convert(nodes, link(1, 1, 2), definitions={"subgraphs": [inside, box | {"inputs": ports}]})
    assert graph.nodes["2"].inputs["filename_prefix"] == expected


@pytest.mark.parametrize(
    ("kind", "name", "fills_in", "expected"),
    [
        ("SaveImage", "filename_prefix", False, "%Empty.height%_a // b"),
        ("SaveImage", "filename_prefix", True, "32_a // b"),
        ("SaveText", "filename_prefix", False, "%Words.value%_a // b"),
        ("SaveText", "filename_prefix", True, "%Empty.height%_a // b"),
        ("Encode", "text", False, "%Words.value%_a "),  # a prompt, although from a primitive
    ],
)
def test_pattern_in_primitive_is_filled_in_if_enabled(kind: str, name: str, fills_in: bool, expected: str) -> None:
    properties = {"Run widget replace on values": fills_in}
    primitive = node(3, "PrimitiveNode", ["%Words.value%_a // b", "fixed"], (), ["STRING"], properties=properties)
    nodes = [
        empty(),
        node(4, "Words", ["%Empty.height%"]),
        node(2, kind, ["x", "md"], [(name, "STRING", 2)]),
        primitive,
    ]
    graph = convert(nodes, link(2, 3, 2))
    assert graph.nodes["2"].inputs[name] == expected


def test_pattern_reads_widget_value_set_by_primitive() -> None:
    target, primitive = node(1, "Empty", [64, 32, 1, 0], [("width", "INT", 1)]), node(2, "PrimitiveNode", [48, "fixed"])
    graph = convert([target, primitive, save(None, "%Empty.width%", 3)], link(1, 2, 1))
    assert graph.nodes["3"].inputs["filename_prefix"] == "48"


@pytest.mark.usefixtures("noon")
def test_date_in_file_name_does_not_change_content_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def content(*changes: str) -> str:
        graph = settings.apply(convert([save(None, "%date:yyyy%")]), list(map(Setting.parse, changes)), SCHEMAS)
        return content_of(graph, {})

    today = content()
    monkeypatch.setattr("test_ui_format.NOON", datetime(2027, 1, 1))
    assert convert([save(None, "%date:yyyy%")]).nodes["2"].inputs["filename_prefix"] == "2027"
    assert content() == today
    assert content("2.filename_prefix=2026") != today


# Inputs that are set


def as_set(nodes: list[Json], *links: Any, changes: list[str], **more: Any) -> tuple[Graph, Json | None]:
    """The graph with inputs set, and the widget values by node id in the workflow that results contain."""
    graph = settings.apply(convert(nodes, *links, **more), list(map(Setting.parse, changes)), SCHEMAS)
    if graph.workflow is None:
        return graph, None
    return graph, {str(each["id"]): each["widgets_values"] for each in graph.workflow["nodes"]}


COMBINED = {"format": "image/gif", "filename_prefix": "%Empty.width%", "frame_rate": 8}
INSIDE = {"id": "s", "nodes": [empty(9)]}


@pytest.mark.parametrize(
    ("nodes", "changes", "expected"),
    [
        ([noise()], ["1.seed=8"], {"1": [48, 8, "randomize", "nan", "a cat", 0.5]}),
        ([noise()], ["1.width=7", "1.gain=1"], {"1": [7, 7, "randomize", "nan", "a cat", 1]}),
        ([noise()], ["1.seed=8", "1.seed=9"], {"1": [48, 9, "randomize", "nan", "a cat", 0.5]}),
        ([noise()], ["1.seed=7"], {"1": [48, 7, "randomize", "nan", "a cat", 0.5]}),
        ([empty()], ["1.batch=32"], {"1": [64, 32, 32, 0]}),  # also the value of another widget
        ([node(1, "VHS_VideoCombine", COMBINED)], ["1.frame_rate=9"], {"1": COMBINED | {"frame_rate": 9}}),
        ([node(1, "Noise", [48])], ["1.gain=2"], None),  # the file has no value at its place
        (
            [node(1, "Empty", [64, 32, 1, 0], [("width", "INT", 1)]), node(2, "PrimitiveNode", [48])],
            ["1.width=5"],
            None,
        ),
        ([node(1, "s")], ["1:9.width=5"], None),  # in a subgraph
        ([empty(), node(2, "Sampler", [1, "fixed"])], ['2.image=["1",0]'], None),  # a link
        ([node(1, "Encode", ["x"])], ["1.text={a|b}"], None),  # the page would make a choice
        (
            [node(1, "Encode", ["{a|b}"]), noise(2)],
            ["2.seed=8"],
            {"1": ["{a|b}"], "2": [48, 8, "randomize", "nan", "a cat", 0.5]},
        ),
    ],
)
def test_saved_workflow_has_set_values_or_is_left_out(
    nodes: list[Json], changes: list[str], expected: Json | None
) -> None:
    linked = [link(1, 2, 1)] if nodes[0]["inputs"] else []
    graph, found = as_set(nodes, *linked, changes=changes, definitions={"subgraphs": [INSIDE]})
    assert found == expected
    assert found is None or ui_format.convert(graph.workflow or {}, SCHEMAS).to_api() == graph.to_api()


DATED = "%date:yyyy%_%Empty.width%"


@pytest.mark.parametrize(
    ("pattern", "changes", "name"),
    [
        (DATED, ["1.width=5"], "2026_5"),
        (DATED, ["1.height=5"], "2026_64"),
        (DATED, ["2.filename_prefix=mine"], "mine"),
        (DATED, ["2.filename_prefix=%Empty.width%"], "%Empty.width%"),  # unchanged
        (DATED, ["1.width=5", "1.width=6"], "2026_6"),
        (DATED, ["1.width=5", "4:10.height=7"], "2026_5"),  # although the file cannot hold all values
        # of nodes in a subgraph
        ("%Noise.width%", ["3:9.width=5"], "5"),
        ("%Noise.seed%", ["3:9.seed=6"], "6"),  # which a primitive set in the file
        ("%Noise.seed%_%Noise.width%", ["3:9.gain=1"], "11_4"),  # as in the file
        ("%Box.size%", ["3:9.width=5"], "5"),  # shown as a widget of the subgraph node
        ("%Box.size%_%Noise.width%", ["3:9.width=5", "3:9.width=6"], "6_6"),
    ],
)
@pytest.mark.usefixtures("noon")
def test_file_name_patterns_use_set_values(pattern: str, changes: list[str], name: str) -> None:
    inner = node(9, "Noise", [4, 7, "fixed", "nan", "", 1], [("width", "INT", 1), ("seed", "INT", 2)])
    box = {
        "id": "box", "name": "My box", "nodes": [inner, node(8, "PrimitiveNode", [11])],
        "links": [link(1, -10, 9), link(2, 8, 9)], "inputs": [{"name": "size", "linkIds": [1]}],
    }  # fmt: skip
    nodes = [empty(), save(1, pattern), node(3, "box", [4], [("size", "INT", None)], title="Box"), node(4, "s")]
    graph, _ = as_set(nodes, link(1, 1, 2), changes=changes, definitions={"subgraphs": [box, INSIDE]})
    assert graph.nodes["2"].inputs["filename_prefix"] == name
    assert graph.workflow is None or ui_format.convert(graph.workflow, SCHEMAS).to_api() == graph.to_api()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (["3:9.width=5"], "64"),  # of one of two uses
        (["3:9.width=5", "4:9.width=6"], "64"),
        (["3:9.width=5", "4:9.width=5"], "5"),
        (['2.image=["1",0]'], "64"),
    ],
)
def test_file_name_uses_set_value_if_all_subgraph_uses_agree(changes: list[str], name: str) -> None:
    nodes = [save(None, "%Empty.width%", 1), node(3, "s"), node(4, "s"), node(2, "Sampler", [1, "fixed"])]
    graph, _ = as_set(nodes, changes=changes, definitions={"subgraphs": [INSIDE]})
    assert graph.nodes["1"].inputs["filename_prefix"] == name


def test_batch_file_names_use_values_set_in_subgraphs(tmp_path: Path) -> None:
    nodes = [empty(), save(1, "%Empty.width%_%Noise.seed%"), node(3, "box", [])]
    box = {"id": "box", "name": "My box", "nodes": [noise(9)]}
    line = {
        "workflow": {"nodes": nodes, "links": [link(1, 1, 2)], "definitions": {"subgraphs": [box]}},
        "set": ["3:9.seed=8"],
        "matrix": {"inputs": {"1.width": [5, 6]}},
    }
    (tmp_path / "jobs").write_text(json.dumps(line))
    jobs = JobsFile(
        tmp_path / "jobs",
        workflows=tmp_path,
        input_dir=None,
        read=lambda data: (ui_format.convert(data, SCHEMAS), SCHEMAS),
    )
    names = [job.graph.nodes["2"].inputs["filename_prefix"] for job in jobs if isinstance(job, Job)]
    assert names == ["5_8", "6_8"]


def test_settings_applied_in_turn_equal_settings_applied_together() -> None:
    nodes, changes = [empty(), save(1, "%Empty.width%_%Empty.height%")], ["1.width=5", "1.height=6"]
    at_once = as_set(nodes, link(1, 1, 2), changes=changes)[0]
    in_turn = settings.apply(as_set(nodes, link(1, 1, 2), changes=changes[:1])[0], [Setting.parse(changes[1])], SCHEMAS)
    assert at_once == in_turn and at_once.nodes["2"].inputs["filename_prefix"] == "5_6"


def test_file_name_of_more_than_100000_letters_is_rejected() -> None:
    words = node(1, "Words", ["w" * 10_000])
    with pytest.raises(WorkflowError, match=r"more than 100,000 letters"):
        convert([words, save(None, "%Words.value%" * 100)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7.0, "7"),
        (0.1, "0.1"),
        (1e-6, "0.000001"),
        (1.5e-7, "1.5e-7"),
        (1e21, "1e+21"),
        (2**64 - 1, "18446744073709552000"),
        (10**400, "Infinity"),
        (-0.0, "0"),
        (True, "true"),
        (None, ""),
        ([1, [2, "a"]], "1,2,a"),
        ({}, "[object Object]"),
    ],
)
def test_values_are_written_as_in_browser(value: Any, expected: str) -> None:
    assert ui_texts.as_page_text(value) == expected


@pytest.mark.parametrize("part", ["{", "}", "|", "\\", "/", "/*a", "{a|", "{\\|", "{{\\{", "{a|b}", "%", "%a.b%", "//"])
def test_long_texts_do_not_hang(part: str) -> None:
    text = (part * 300_000)[:300_000]
    with no_hang("a text of 300,000 characters"), suppress(WorkflowError):
        ui_texts.choose(text, lambda: 0.5)
    with no_hang("a file name of 300,000 characters"), suppress(WorkflowError):
        ui_texts.fill_in(text, lambda name, widget: "c", NOON)


@pytest.mark.parametrize("stray", [{"name": "foo"}, {"promoted": [["1", "x"]]}, {"fills_in": True}])
def test_unknown_node_fields_are_ignored(stray: Json) -> None:
    node = {"id": 1, "type": "KSampler"}
    assert fitting(UiNode, {**node, **stray}) == fitting(UiNode, node)


def test_node_name_that_is_not_text_is_ignored() -> None:
    properties = {"Node name for S&R": float("nan")}
    assert fitting(UiNode, {"id": 1, "type": "KSampler", "properties": properties}).name is None
