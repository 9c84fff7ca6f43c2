"""A large model that says what a small one says: for timing a pair of models whose acceptance is known.

Its hidden rows are the small one's with zeros behind them. Heads, columns of the MLP and layers that the
small one lacks are copies of its own whose outputs are multiplied by zeros. So each product costs what it
costs in a model of that size, and the logits are the small one's.

`python -m tests.widened FOLDER` makes the bundled target, as large as Llama-3.2-1B, and its drafter as GGUF
files: `target-BF16.gguf` (for llama.cpp's `llama-quantize`) and `draft-Q8_0.gguf`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from flowspec.model.files import bundled_folder
from flowspec.model.json_files import read_json
from lab.command import Parser, run_command
from tests.ggufs import convert
from tests.vocabularies import bundled

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Width:
    """How large it shall be; heads are as wide as the small model's."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


LLAMA_1B = Width(hidden=2048, intermediate=8192, layers=20, heads=32, kv_heads=8)
"""Layers of Llama-3.2-1B, and four more for want of its large vocabulary: 1.22 G parameters."""


def widen(small: Path, folder: Path, width: Width) -> Path:
    """Makes the checkpoint of a small Llama, whose heads have keys of their own and whose embedding is tied,
    that large. Norms are in float32, all else is in the dtype of the small one."""
    config: dict[str, Any] = read_json(small / "config.json")
    given = load_file(small / "model.safetensors")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, head = config["num_attention_heads"], config["head_dim"]
    assert config["num_key_value_heads"] == heads, "each with keys of its own"
    assert config["tie_word_embeddings"], "or lm_head would be needed, too"
    columns = torch.arange(width.hidden) % hidden
    inner = torch.arange(width.intermediate) % config["intermediate_size"]
    group = width.heads // width.kv_heads
    of_keys = _numbers(torch.arange(width.kv_heads) % heads, head)
    of_queries = _numbers(torch.arange(width.heads) // group % heads, head)
    own_queries = _numbers(torch.arange(heads) * group, head)  # each first of those with the same keys

    def norm(name: str) -> torch.Tensor:
        """The mean square of a row with zeros behind it is smaller."""
        return given[name].float()[columns] * math.sqrt(hidden / width.hidden)

    def output(name: str, places: torch.Tensor, inputs: int) -> torch.Tensor:
        found = torch.zeros(width.hidden, inputs, dtype=given[name].dtype)
        found[:hidden, places] = given[name]
        return found

    embedding = given["model.embed_tokens.weight"]
    made: Weights = {
        "model.embed_tokens.weight": torch.nn.functional.pad(embedding, (0, width.hidden - hidden)),
        "model.norm.weight": norm("model.norm.weight"),
    }
    sources = [number * layers // width.layers for number in range(width.layers)]
    for number, source in enumerate(sources):
        old, new = f"model.layers.{source}.", f"model.layers.{number}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            made[new + name] = norm(old + name)
        for name, rows in (
            ("self_attn.q_proj.weight", of_queries),
            ("self_attn.k_proj.weight", of_keys),
            ("self_attn.v_proj.weight", of_keys),
            ("mlp.gate_proj.weight", inner),
            ("mlp.up_proj.weight", inner),
        ):
            made[new + name] = given[old + name][rows][:, columns]
        for name, places, inputs in (
            ("self_attn.o_proj.weight", own_queries, width.heads * head),
            ("mlp.down_proj.weight", torch.arange(config["intermediate_size"]), width.intermediate),
        ):
            made[new + name] = output(old + name, places, inputs)
            if source in sources[:number]:  # a copy: what it adds is nothing
                made[new + name].zero_()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: values.contiguous() for name, values in made.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (small / name).is_file():
            shutil.copy(small / name, folder)
    wide = {
        "hidden_size": width.hidden,
        "intermediate_size": width.intermediate,
        "num_hidden_layers": width.layers,
        "num_attention_heads": width.heads,
        "num_key_value_heads": width.kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * hidden / width.hidden,
    }
    (folder / "config.json").write_text(json.dumps({**config, **wide}, indent=2), "utf-8")
    return folder


def _numbers(heads: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers of these heads, one head after another."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def command(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=args.folder.parent) as room:
        wide = widen(bundled_folder("target"), Path(room), LLAMA_1B)
        made = [
            convert(checkpoint, args.folder / f"{name}-{kind.name}.gguf", kind, metadata=bundled())
            for checkpoint, name, kind in (
                (wide, "target", GGMLQuantizationType.BF16),
                (bundled_folder("draft"), "draft", GGMLQuantizationType.Q8_0),
            )
        ]
    print(json.dumps(list(map(str, made))) if args.json else "\n".join(map(str, made)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.widened", __doc__)
    parser.add_argument("folder", type=Path)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
