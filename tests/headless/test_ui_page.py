"""UI-format workflows become what ComfyUI's page sends for them: widgets, prompts, file names."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch.content import content_of
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, settings, ui_format, ui_names, ui_texts
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link
from comfyui_onediff_guard.headless.workflow.settings import Setting
from waiting import no_hang

Json = dict[str, Any]
PROMPT = ["STRING", {"multiline": True, "dynamicPrompts": True}]
SIZES = {"width": ["INT", {"default": 512}], "height": ["INT", {"default": 512}]}
INFO: Json = {
    "Checkpoint": {"input": {"required": {"name": [["a.safetensors"], {}]}}, "output": ["MODEL", "CLIP", "VAE"]},
    "Encode": {
        "input": {"required": {"text": PROMPT, "clip": ["CLIP", {}]}, "optional": {"note": ["STRING", {}]}},
        "output": ["CONDITIONING"],
    },
    "Empty": {
        "input": {"required": {**SIZES, "batch": ["INT", {"default": 1}], "color": ["INT", {}]}},
        "output": ["IMAGE"],
        "display_name": "Empty Image",
    },
    "Sampler": {
        "input": {"required": {"seed": ["INT", {"control_after_generate": True}], "image": ["IMAGE", {}]}},
        "output": ["IMAGE"],
    },
    "Words": {"input": {"required": {"value": ["STRING", {}]}}, "output": ["STRING"]},
    "SaveImage": {"input": {"required": {"images": ["IMAGE", {}], "filename_prefix": ["STRING", {"default": "x"}]}}},
    "SaveText": {
        "input": {
            "required": {
                "text": ["STRING", {"forceInput": True}],
                "filename_prefix": ["STRING", {}],
                "format": [["txt", "md"], {}],
            }
        }
    },
    "Sockets": {
        "input": {
            "required": {
                "strength": ["FLOAT", {"forceInput": True}],
                "steps": ["INT", {"default": 20}],
                "seed": ["INT", {"control_after_generate": True}],
                "image": ["IMAGE", {"forceInput": True}],
            },
            "optional": {"scale": ["FLOAT", {"defaultInput": True}], "last": ["FLOAT", {"default": 1.0}]},
        }
    },
    "Upscale": {
        "input": {"required": {"upscale_model": ["UPSCALE_MODEL", {}], "image": ["IMAGE", {}]}},
        "output": ["IMAGE"],
    },
    "UpscaleLoader": {"input": {"required": {"name": [["a.pth"], {}]}}, "output": ["UPSCALE_MODEL"]},
    "VHS_VideoCombine": {
        "input": {
            "required": {
                "images": ["IMAGE", {}],
                "frame_rate": ["FLOAT", {"default": 8}],
                "loop_count": ["INT", {"default": 0}],
                "filename_prefix": ["STRING", {"default": "AnimateDiff"}],
                "format": [["image/gif", "video/h265-mp4"], {}],
                "pingpong": ["BOOLEAN", {"default": False}],
                "save_output": ["BOOLEAN", {"default": True}],
            }
        }
    },
    "Camera": {"input": {"required": {"image": ["WEBCAM", {}]}}, "output": ["IMAGE"]},
}
SCHEMAS = {name: schema.from_object_info(name, info) for name, info in INFO.items()}
NOON = datetime(2026, 3, 5, 7, 8, 9)


def node(node_id: int, kind: str, widgets: Any = None, inputs: Any = (), outputs: Any = (), **more: Any) -> Json:
    return {
        "id": node_id,
        "type": kind,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"type": type_} for type_ in outputs],
        "widgets_values": widgets,
        **more,
    }


def empty(node_id: int = 1, widgets: Any = (64, 32, 1, 0), **more: Any) -> Json:
    return node(node_id, "Empty", list(widgets), (), ["IMAGE"], **more)


def save(link: int | None = None, prefix: str = "x", node_id: int = 2) -> Json:
    return node(node_id, "SaveImage", [prefix], [("images", "IMAGE", link)])


def link(number: int, origin: int, target: int, slot: int = 0, kind: str = "IMAGE") -> list[Any]:
    return [number, origin, slot, target, 0, kind]


def convert(nodes: list[Json], *links: Any, **more: Any) -> Graph:
    data = {"nodes": nodes, "links": list(links), **more}
    types = ui_format.class_types(data) | ui_format.named_types(data)
    return ui_format.convert(data, {name: SCHEMAS[name] for name in types & SCHEMAS.keys()})


def sent(text: str, seed: int = 1) -> str:
    """What an encoder beside a sampler of this seed gets."""
    graph = convert([node(1, "Encode", [text]), node(2, "Sampler", [seed, "randomize"])])
    return graph.nodes["1"].inputs["text"]


# Widgets


def test_widgets_that_are_stored_by_name_are_passed_on_and_missing_ones_have_their_defaults() -> None:
    stored = {
        "frame_rate": 12,
        "format": "video/h265-mp4",
        "pix_fmt": "yuv420p",
        "crf": 11,
        "save_metadata": False,
        "videopreview": {"params": {}},
        "choose video to upload": "image",
        "images": 5,
    }
    graph = convert([empty(), node(2, "VHS_VideoCombine", stored, [("images", "IMAGE", 1)])], link(1, 1, 2))
    assert graph.nodes["2"].inputs == {
        "frame_rate": 12,
        "loop_count": 0,
        "filename_prefix": "AnimateDiff",
        "format": "video/h265-mp4",
        "pix_fmt": "yuv420p",
        "crf": 11,
        "save_metadata": False,
        "pingpong": False,
        "save_output": True,
        "images": Link("1", 0),
    }


@pytest.mark.parametrize(
    ("kind", "widgets", "expected"),
    [
        ("SaveText", ["", "notes/today", "md"], {"filename_prefix": "notes/today", "format": "md"}),
        ("SaveText", ["notes/today", "md"], {"filename_prefix": "notes/today", "format": "md"}),
        # strength, steps, seed and its control, image, scale, last
        ("Sockets", [49, 30, 7, "fixed", None, 2.0, 0.5], {"steps": 30, "seed": 7, "last": 0.5}),
        ("Sockets", [30, 7, "fixed", 0.5], {"steps": 30, "seed": 7, "last": 0.5}),
    ],
)
def test_what_is_stored_for_inputs_that_are_sockets_alone_shifts_nothing(
    kind: str, widgets: list[Any], expected: Json
) -> None:
    assert convert([node(1, kind, widgets)]).nodes["1"].inputs == expected


# Prompts


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
        (r"\\{a} {\\\{|\\\{}", r"\\a \{"),
        ("ends in \\", "ends in \\undefined"),
        ("a boat /* old\none */ at sea // harbour\nat noon", "a boat  at sea \nat noon"),
        ("see http://a.example/b\nhere", "see http:\nhere"),
        ("a /* b", "a /* b"),
        ("a /*/ b */ c", "a  c"),
        ("{a//|b}\n}", "a\n"),
        ("a // b\u2028c", "a \u2028c"),
    ],
)
def test_prompts_lose_their_comments_and_have_their_choices_made(text: str, expected: str) -> None:
    assert sent(text) == expected


def test_texts_that_are_no_prompts_stay_as_they_are() -> None:
    stays = "{a|b} // c"
    nodes = [node(1, "Encode", ["x", stays]), node(3, "Words", [stays]), node(4, "SaveText", [stays, "md"])]
    graph = convert(nodes)
    assert graph.nodes["1"].inputs["note"] == stays
    assert graph.nodes["3"].inputs["value"] == stays
    assert graph.nodes["4"].inputs["filename_prefix"] == stays


def test_choices_hang_on_the_seed_that_the_run_has_in_the_end() -> None:
    text = "{" + "|".join(map(str, range(1000))) + "}"
    assert sent(text) == sent(text)
    assert len({sent(text, seed) for seed in range(20)}) > 10
    graph = convert([node(1, "Encode", [text]), node(3, "Encode", [text]), node(2, "Sampler", [1, "randomize"])])
    assert graph.nodes["1"].inputs != graph.nodes["3"].inputs

    def made(*changes: str) -> Any:
        return settings.apply(graph, list(map(Setting.parse, changes)), SCHEMAS).nodes["1"].inputs["text"]

    assert made("2.seed=5") == sent(text, 5)
    assert made("1.text={a|b}") == "{a|b}"  # as it was typed
    linked = [node(1, "Encode", [text]), node(2, "Sampler", [1, "fixed"], [("seed", "INT", 9)])]
    by_source = {
        convert([*linked, empty(3, (seed, 1, 1, 1))], link(9, 3, 2)).nodes["1"].inputs["text"] for seed in range(9)
    }
    assert len(by_source) > 4


def test_half_a_character_is_refused() -> None:
    with pytest.raises(WorkflowError, match=r"node 1 \(Encode\): input 'text' holds half a character"):
        sent("a \ud83d cat")


# File names


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOON

    monkeypatch.setattr(ui_names, "datetime", Clock)


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
        ("%Empty Image.height%", "32"),  # by the title that a new node has
        ("%Muted.value%_%Words.value%", "a_b_my set"),
        ("%Titled.width%", "1"),  # the first of two
        ("%Empty.nothing%_%Nobody.width%_%%_100%", "%Empty.nothing%_%Nobody.width%_%%_100%"),
        ("%Odd.value%", "a_b_c__ d"),
        ("%Note.text%-%Primitive.value%", "hello-%Empty.height%"),
        ("%Inside.width%", "7"),
        ("%Red.width%", "%Red.width%"),  # of a pack that the host does not have
    ],
)
@pytest.mark.usefixtures("noon")
def test_patterns_in_file_names(prefix: str, expected: str) -> None:
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
    ]
    graph = convert(nodes, link(1, 1, 2), definitions={"subgraphs": [inside]})
    assert graph.nodes["2"].inputs["filename_prefix"] == expected


@pytest.mark.parametrize(
    ("kind", "name", "fills_in", "expected"),
    [
        ("SaveImage", "filename_prefix", False, "32_a"),
        ("SaveImage", "filename_prefix", True, "32_a"),
        ("SaveText", "filename_prefix", False, "%Empty.height%_a"),
        ("SaveText", "filename_prefix", True, "32_a"),
        ("Encode", "text", False, "%Empty.height%_a"),
    ],
)
def test_patterns_through_a_primitive(kind: str, name: str, fills_in: bool, expected: str) -> None:
    primitive = node(3, "PrimitiveNode", ["%Empty.height%_a", "fixed"], (), ["STRING"])
    primitive["properties"] = {"Run widget replace on values": fills_in}
    graph = convert([empty(), node(2, kind, ["x", "md"], [(name, "STRING", 2)]), primitive], link(2, 3, 2))
    assert graph.nodes["2"].inputs[name] == expected


def test_a_pattern_reads_what_a_primitive_puts_into_a_widget_and_prompts_from_one_are_prompts() -> None:
    nodes = [
        node(1, "Empty", [64, 32, 1, 0], [("width", "INT", 1)]),
        node(2, "PrimitiveNode", [48, "fixed"]),
        save(None, "%Empty.width%", 3),
        node(4, "PrimitiveNode", ["a // b"]),
        node(5, "Encode", ["x"], [("text", "STRING", 2)]),
    ]
    graph = convert(nodes, link(1, 2, 1), link(2, 4, 5))
    assert graph.nodes["3"].inputs["filename_prefix"] == "48"
    assert graph.nodes["5"].inputs["text"] == "a "


@pytest.mark.usefixtures("noon")
def test_a_date_in_a_file_name_does_not_make_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def content(*changes: str) -> str:
        graph = settings.apply(convert([save(None, "%date:yyyy%")]), list(map(Setting.parse, changes)), SCHEMAS)
        return content_of(graph, SCHEMAS, None)

    today = content()
    monkeypatch.setattr("test_ui_page.NOON", datetime(2027, 1, 1))
    assert convert([save(None, "%date:yyyy%")]).nodes["2"].inputs["filename_prefix"] == "2027"
    assert content() == today
    assert content("2.filename_prefix=2026") != today


def test_file_names_that_grow_without_end_are_refused() -> None:
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
def test_values_as_the_page_writes_them(value: Any, expected: str) -> None:
    assert ui_texts.as_page_text(value) == expected


@pytest.mark.parametrize("part", ["{", "}", "|", "\\", "/", "/*a", "{a|", "{\\|", "{{\\{", "{a|b}", "%", "%a.b%", "//"])
def test_long_texts_take_time_in_proportion(part: str) -> None:
    text = (part * 300_000)[:300_000]
    with no_hang("a text of 300,000 characters"), suppress(WorkflowError):
        ui_texts.choose(text, lambda: 0.5)
        ui_texts.fill_in(text, lambda name, widget: "c", NOON)
