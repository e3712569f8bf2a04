"""What is read of a UI-format file. The rest of it is the page's own: places, colours, what is folded."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from ...trust.foreign import Foreign


def _whole(value: Any) -> Any:
    """To the page all numbers are of one kind, and tools that write its files make floats of them: 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: Any) -> Any:
    """An id as text: the page takes 5 and "5" for the same."""
    value = _whole(value)
    return str(value) if type(value) is int else value


def _object_or_nothing(value: Any) -> Any:
    """What packs and tools keep in a file beside the workflow, where that is laid out as the page does it."""
    return value if isinstance(value, dict) else None


def _list_or_object(value: Any) -> Any:
    if value is not None and not isinstance(value, (list, dict)):
        raise PydanticCustomError("widgets_type", "input should be a list or an object")
    return value


Id = Annotated[str, BeforeValidator(_as_text)]
Whole = Annotated[int, BeforeValidator(_whole)]


def _promotions(value: Any) -> Any:
    """Lists of two or three texts; the page leaves the whole alone where it is anything else."""
    fits = isinstance(value, list) and all(
        isinstance(each, list) and len(each) in (2, 3) and all(isinstance(part, str) for part in each) for each in value
    )
    return value if fits else []


class UiSlot(Foreign):
    type: Annotated[str, BeforeValidator(str)] = "*"  # old files have a drop-down's options here


class UiInput(UiSlot):
    name: str
    link: Id | None = None
    widget: Annotated[dict[str, JsonValue] | None, BeforeValidator(_object_or_nothing)] = None  # where it has one


class _Properties(Foreign):
    # of a subgraph node: [id of an inner node, its widget, ...] for each widget that is shown on it; up to early 2026
    promoted: Annotated[list[list[str]], BeforeValidator(_promotions)] = Field(default=[], alias="proxyWidgets")
    name: JsonValue = Field(default="", alias="Node name for S&R")  # by which patterns in file names mean it
    fills_in: JsonValue = Field(default=False, alias="Run widget replace on values")  # of a primitive


class UiNode(Foreign):
    id: Id
    type: str
    mode: Whole | None = 0
    title: str | None = None
    inputs: list[UiInput] | None = None
    outputs: list[UiSlot] | None = None
    properties: Annotated[_Properties | None, BeforeValidator(_object_or_nothing)] = None
    widgets_values: Annotated[JsonValue, BeforeValidator(_list_or_object)] = None

    @property
    def promoted(self) -> list[list[str]]:
        return self.properties.promoted if self.properties else []

    @property
    def name(self) -> str | None:
        """By which the patterns of file names mean it; "": the page gives it one."""
        name = self.properties.name if self.properties else ""
        return name if isinstance(name, str) else None

    @property
    def first_value(self) -> JsonValue:
        """What its first widget holds, in a node that the page itself makes."""
        return self.widgets_values[0] if isinstance(self.widgets_values, list) and self.widgets_values else None

    @property
    def fills_in_patterns(self) -> bool:
        """Whether a primitive fills in the %patterns% of its value."""
        return bool(self.properties and self.properties.fills_in)


class UiLink(Foreign):
    id: Id
    origin_id: Id
    origin_slot: Whole
    target_id: Id
    type: Annotated[str, BeforeValidator(str)] = "*"

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        """Of [id, origin, slot, target, slot, type], as links were written at first."""
        if not isinstance(value, list):
            return value
        if len(value) < 5:
            raise PydanticCustomError("link_length", "a link should have 6 entries")
        return dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), value, strict=False))


class UiPort(UiSlot):
    """An input or an output of a subgraph."""

    name: str
    links: list[Id] | None = Field(default=None, alias="linkIds")  # within it


class UiSubgraph(Foreign):
    id: Id
    name: str | None = None
    nodes: list[UiNode] | None = None
    links: list[UiLink | None] | None = None
    inputs: list[UiPort] | None = None
    outputs: list[UiPort] | None = None


class _Definitions(Foreign):
    subgraphs: list[UiSubgraph] | None = None


class _Extra(Foreign):
    group_nodes: dict[str, JsonValue] | None = Field(default=None, alias="groupNodes")


class UiFile(Foreign):
    last_node_id: Annotated[JsonValue, BeforeValidator(_whole)] = None
    nodes: list[UiNode]
    links: list[UiLink | None] | None = None
    definitions: _Definitions | None = None
    extra: Annotated[_Extra | None, BeforeValidator(_object_or_nothing)] = None

    def subgraphs(self) -> dict[str, UiSubgraph]:
        """By the node type that each is."""
        return {subgraph.id: subgraph for subgraph in (self.definitions and self.definitions.subgraphs) or ()}

    def groups(self) -> set[str]:
        """The node types that are group nodes."""
        return set((self.extra and self.extra.group_nodes) or ())
