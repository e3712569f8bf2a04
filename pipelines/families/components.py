"""Components of diffusers pipelines, and those that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ...trust.text import shown
from ..errors import LibraryFailed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ComponentSpec:
    """One folder of a diffusers pipeline."""

    library: str  # "diffusers" or "transformers"
    classes: tuple[str, ...]  # accepted in model_index.json; the first is the usual one
    fields: tuple[str, ...] = ()  # of its config, those that are used; none named: all that its classes take
    needs: tuple[tuple[str, ...], ...] = ()  # where it has no weights: of each group of files, one or more
    reads: tuple[str, ...] = ()  # files that may be beside them. No others are read

    @property
    def weights(self) -> bool:
        return not self.needs

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read of a component without weights."""
        return (*(name for group in self.needs for name in group), *self.reads)

    def class_named(self, name: str = "") -> Any:
        """Return a class of its library: the usual one where none is named, or where the installed version has none of
        this name.

        Raises LibraryFailed where the library cannot be imported.
        """
        try:
            import diffusers
            import transformers

            library = {"diffusers": diffusers, "transformers": transformers}[self.library]
            return getattr(library, name, None) or getattr(library, self.classes[0])
        except Exception as error:
            raise LibraryFailed(
                "{} cannot be imported ({}: {}). Install requirements.txt of this pack again, and unset "
                "PYTHONOPTIMIZE: 2 takes away docstrings that it reads.",
                *(self.library, type(error).__name__, shown(str(error), 300)),
            ) from error

    def defaults(self, name: str = "") -> dict[str, Any]:
        """Return {field of a config that counts: its default}, None where it has none. Raises LibraryFailed."""
        if self.fields and not self.weights:
            return dict.fromkeys(self.fields)
        found: dict[str, Any] = {}
        for known in (*self.classes, name):  # one scheduler reads another's config
            cls = self.class_named(known)
            taken = signature(getattr(cls, "config_class", cls).__init__).parameters.items()
            found |= {field: it.default for field, it in taken if it.default is not Parameter.empty}
        return {field: found.get(field) for field in self.fields} if self.fields else found

    def on_meta(self, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Build what a config describes on the meta device, where it takes no memory.

        dtype: what its weights are in, as if they had been loaded in that; None leaves them as the class makes them.
        """
        import torch

        from ...precision.loaded_weights import as_loaded

        cls = self.class_named()
        with torch.device("meta"):
            if self.library == "transformers":
                module = cls(cls.config_class.from_dict(dict(config)))
            else:
                module = cls.from_config(dict(config))
        torch.nn.Module.to(module, "meta")  # what asked for another device
        return as_loaded(module, dtype) if dtype else module


_T5_FIELDS = (
    *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon"),
    *("initializer_factor", "feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings"),
    *("pad_token_id", "eos_token_id"),
)
TOKENIZER_FIELDS = ("extra_ids", "legacy", "add_bos_token", "add_eos_token")  # each of T5's extra ids becomes a token
TOKENIZER_ALSO = ("special_tokens_map.json", "added_tokens.json")
T5_TOKENIZER = ComponentSpec(
    "transformers",
    ("T5Tokenizer", "T5TokenizerFast"),
    TOKENIZER_FIELDS,
    needs=(("tokenizer_config.json",), ("spiece.model", "tokenizer.json")),
    reads=TOKENIZER_ALSO,
)


def t5_encoder(name: str) -> ComponentSpec:
    """Make the spec of a text encoder of T5's kind. name: its class in transformers."""
    return ComponentSpec("transformers", (name,), _T5_FIELDS)


def diffusers_model(name: str) -> ComponentSpec:
    """Make the spec of a denoiser or a VAE. name: its class in diffusers."""
    return ComponentSpec("diffusers", (name,))


def scheduler(*classes: str) -> ComponentSpec:
    """Make the spec of a scheduler. classes: names of those in diffusers that it may be, the usual one first."""
    return ComponentSpec("diffusers", classes, needs=(("scheduler_config.json",),))
