"""The table of all families, found by their modules: a new family is a new module of this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ...precision.policy import Variant
from .spec import FamilySpec

_names = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
_modules = [import_module(f".{name}", __package__) for name in _names if name != Path(__file__).stem]
_families: list[FamilySpec] = [family for module in _modules for family in getattr(module, "FAMILIES", ())]
FAMILIES: dict[str, FamilySpec] = {family.pipeline: family for family in _families}  # by diffusers class
VARIANTS: dict[str, Variant] = {variant.name: variant for family in FAMILIES.values() for variant in family.variants}
