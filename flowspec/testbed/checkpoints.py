"""Makes small checkpoints with random weights, one for each supported family and variant: for tests and for `verify`.

python -m flowspec.testbed.checkpoints FOLDER             one folder per variant
python -m flowspec.testbed.checkpoints FOLDER --gigabyte  one sharded Llama of about 1 GB in bfloat16
python -m flowspec.testbed.checkpoints FOLDER --drafter-for MODEL
                                                          a drafter with MODEL's vocabulary that knows nothing
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from flowspec.model.files import ModelFiles

VOCABULARY_SIZE = 300
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide enough that logits are far apart, as a trained model's are
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("llama", {"num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 4}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "mistral-sliding": ("mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
}
GIGABYTE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def make_checkpoint(
    folder: Path, family: str, shape: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> Path:
    """A folder with config and safetensors of a random model, in the Hugging Face layout."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **shape)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or "norm" in name:  # initialised to constants, which would hide a mix-up
            parameter.data += 0.1 * torch.randn_like(parameter)
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def make_variant(folder: Path, name: str) -> Path:
    """One of `VARIANTS`, by name."""
    family, overrides = VARIANTS[name]
    return make_checkpoint(folder, family, {**SMALL, **overrides}, seed=sum(map(ord, name)))


def make_useless_drafter(folder: Path, target: ModelFiles) -> Path:
    """One layer of random weights with the target's vocabulary and tokenizer: a drafter that is right by chance only."""
    shape = {**SMALL, "vocab_size": target.config().vocab_size, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    make_checkpoint(folder, "llama", shape)
    tokenizer = target.find("tokenizer.json")
    if tokenizer is not None:
        shutil.copy(tokenizer, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flowspec.testbed.checkpoints", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabyte", action="store_true", help="one checkpoint of about 1 GB instead")
    parser.add_argument(
        "--drafter-for", metavar="MODEL", help="a drafter of random weights for this model (bundled, folder or hub id) instead"
    )
    args = parser.parse_args()
    if args.drafter_for is not None:
        print(make_useless_drafter(args.folder, ModelFiles(args.drafter_for)))
        return
    if args.gigabyte:
        print(make_checkpoint(args.folder, "llama", GIGABYTE, dtype=torch.bfloat16, shard="200MB"))
        return
    for name in VARIANTS:
        print(make_variant(args.folder / name, name))


if __name__ == "__main__":
    main()
