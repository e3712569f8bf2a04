"""Every family, found by its module: a new family is a new module of this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ...precision.policy import Variant
from .spec import FamilySpec


def _families() -> list[FamilySpec]:
    """List the families in the order of their modules' names."""
    names = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
    modules = (import_module(f".{name}", __package__) for name in names if name != Path(__file__).stem)
    return [family for module in modules for family in getattr(module, "FAMILIES", ())]


FAMILIES: dict[str, FamilySpec] = {family.pipeline: family for family in _families()}  # by diffusers class
VARIANTS: dict[str, Variant] = {variant.name: variant for family in FAMILIES.values() for variant in family.variants}
