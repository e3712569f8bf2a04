"""subgraphs/ is what scripts/blueprints.py folds out of the shipped workflows."""

from __future__ import annotations

import blueprints
import pytest

LONGEST = 32  # letters of a name that the page's search finds when it is typed whole


def test_they_are_as_written_by_the_tool() -> None:
    written = dict(blueprints.files())
    assert {file: file.read_text(encoding="utf-8") for file in blueprints.FOLDER.iterdir()} == written, (
        "run python scripts/blueprints.py"
    )


@pytest.mark.parametrize("blueprint", blueprints.BLUEPRINTS, ids=lambda blueprint: blueprint.name)
def test_a_search_takes_its_name(blueprint: blueprints.Blueprint) -> None:
    assert len(blueprint.name) <= LONGEST
