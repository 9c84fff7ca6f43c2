"""What small models of every family compute, without their weights."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.model.accelerator import importing
from flowspec.model.families import FAMILIES, Family, decoder_config
from flowspec.model.spec import spec_of
from tests.checkpoints import SMALL, VARIANTS


@functools.cache
def spec_of_variant(name: str) -> ModelSpec:
    """Of a checkpoint of `tests.checkpoints`."""
    with importing():
        from transformers import AutoConfig

    family, overrides = VARIANTS[name]
    own, part = {**SMALL, **overrides}, FAMILIES[family].part
    fields = {part: own, "tie_word_embeddings": own["tie_word_embeddings"]} if part else own
    return spec_of(decoder_config(AutoConfig.for_model(family, **fields), name))


def class_of(family: Family, name: str) -> Any:
    """One of transformers' classes of a family, for example `DecoderLayer`."""
    module = next(name for name, each in FAMILIES.items() if each == family).removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(modeling, f"{family.prefix}Text{name}", None) or getattr(modeling, family.prefix + name)
