"""ComfyUI's node for torch.compile, with the compiler that people use, before NaN Guard (native) and after it."""

from __future__ import annotations

import native
import pytest


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_inductor_cases", tmp_path_factory.mktemp("native_inductor"), leg=leg)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", native.FAMILIES)
def test_a_model_that_inductor_compiled_is_guarded(ran: native.Ran, family: str, order: str) -> None:
    if family not in ran["inductor/families"]:
        pytest.skip(f"this ComfyUI has no {family}, or it is of sd15's class")
    assert not ran[f"inductor/{family}, error"], ran[f"inductor/{family}, error"]
    exact = ran[f"inductor/{family}, fp32"]
    rounding = native.difference(ran[f"inductor/{family}, plain"], exact)
    assert native.difference(ran[f"inductor/{family}, {order}"], exact) <= 2 * rounding
