"""The NaN Guard node for a pipeline, and the parser of a node's `profile` input."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import message_of
from . import inputs
from .node import PipelineChange

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle
    from ..precision.overrides import Profile


logger = logging.getLogger(__name__)

PROFILE = "the NaN Guard's profile"  # its name in messages
WORDS = ("black image", "black video", "NaN", "infinite", "overflow", "rerun", *inputs.PRECISION_WORDS)  # for searches


class NaNGuard(PipelineChange):
    """Pipeline → the same pipeline with another guard policy."""

    TITLE = "NaN Guard"
    CATEGORY = inputs.GUARD
    SEARCH_ALIASES = [*WORDS]
    DESCRIPTION = (
        "Sets what happens when a step is NaN or infinite. Pipelines without this node are guarded too (rerun). "
        "It does not apply to precision 'fp16 (plain)'."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        give_up_tip = "For scope learned: after this many failing steps, the rest of the run is in fp32."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "on_failure": inputs.on_failure(),
                "exact_fp32": inputs.exact_fp32(),
            },
            "optional": {
                "scope": inputs.choice(
                    inputs.SCOPES,
                    "learned (recommended): recompute the step, and protect the model from then on, also in later "
                    "runs. step: recompute only the failing step. run: the rest of the run is in fp32.",
                    default="learned",
                ),
                "give_up_after": inputs.integer(3, 1, 1000, 1, give_up_tip, advanced=True),
                "report_each_step": inputs.flag(
                    True, "On: the report has a line for every step. Off: only the summary.", advanced=True
                ),
                "profile": inputs.profile(advanced=True),
            },
            "hidden": inputs.node_id(),
        }

    @classmethod
    def VALIDATE_INPUTS(cls, profile: str | None = None) -> bool | str:
        return what_is_wrong_with(profile) or True

    def apply(
        self,
        pipeline: PipelineHandle,
        on_failure: str,
        exact_fp32: bool,
        scope: str = "learned",
        give_up_after: int = 3,
        report_each_step: bool = True,
        profile: str = "",
        node_id: str | None = None,
    ) -> tuple[PipelineHandle]:
        from ..precision.guard import GuardPolicy, OnFailure, Scope
        from ..precision.policy import Component

        policy = GuardPolicy(OnFailure(on_failure), exact_fp32, Scope(scope), give_up_after)
        guarded = replace(
            pipeline, policy=policy, guard_node=True, full_report=report_each_step, profile=parsed(profile)
        )
        for warning in guarded.idle_guard(guarded.plan(Component.DENOISER)):
            logger.warning("%s", warning)
            host.say(node_id, warning)
        return (guarded,)


def parsed(profile: str) -> Profile | None:
    """Return the profile in a `profile` input; None if it is empty. Raises BadProfile."""
    from ..precision.overrides import parse

    return parse(profile, PROFILE) if profile.strip() else None


def what_is_wrong_with(profile: str | None) -> str:
    """Return the fault of a `profile` input; "" if it can be used. profile: None if it is wired."""
    from ..precision.overrides import BadProfile

    try:
        parsed(profile or "")
    except BadProfile as error:
        return translated(message_of(error))
    return ""
