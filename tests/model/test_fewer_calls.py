"""Attention and MLPs in fewer calls: the bits of transformers' own code, and that code where it does more."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama import modeling_llama as llama

from flowspec.bench.checkpoints import SMALL, VARIANTS
from flowspec.model import pieces
from flowspec.model.attention import attended
from flowspec.model.families import FAMILIES
from flowspec.model.fewer_calls import in_fewer_calls
from flowspec.model.pieces import Pieces, Span
from flowspec.model.products import filled
from flowspec.model.slice import Slice
from tests.model.slices import job_of, part_of

FUNCTIONS = {"SiLUActivation": "silu", "SiLU": "silu"}


def slice_of(variant: str) -> Slice:
    """Two layers of random weights; of layers with and without a window, or turns, both kinds."""
    name, changes = VARIANTS[variant]
    config = AutoConfig.for_model(name, **{**SMALL, **changes})
    made = Pieces.build(config, FAMILIES[name], Span(first=2, end=4, count=config.num_hidden_layers + 1))
    generator = torch.Generator().manual_seed(1)
    for module in made.loaded:
        module.to_empty(device="cpu").to(torch.bfloat16)
        for weights in module.parameters():
            weights.data = (torch.randn(weights.shape, generator=generator) * 0.15).bfloat16()
    made.call_directly(filled)
    return Slice(made, "bfloat16", torch.device("cpu"))


def run(part: Slice, requests: list[tuple[int, int]]) -> torch.Tensor:
    """What layers give for so many rows each of some requests, behind what they have run."""
    generator = torch.Generator().manual_seed(2)
    parts = [
        part_of(request, [0] * count, first=first, sampled=np.zeros(count, dtype=np.bool_))
        for request, (first, count) in enumerate(requests)
    ]
    total = sum(count for _, count in requests)
    given = torch.randn((total, part.config.hidden_size), generator=generator).bfloat16()
    return part.forward(job_of(*parts), given)[1]


@pytest.mark.parametrize(
    "variant", ["llama-grouped", "qwen2-sliding", "qwen3", "mistral-sliding", "gemma2", "smollm3", "granite"]
)
def test_layers_give_the_bits_of_transformers_code(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, attends = slice_of(variant), 0

    def count(*args: Any, **others: Any) -> torch.Tensor:
        nonlocal attends
        attends += 1
        return attended(*args, **others)

    monkeypatch.setattr(pieces, "in_fewer_calls", lambda *_: None)
    own = slice_of(variant)
    monkeypatch.setattr("flowspec.model.attention.attended", count)  # by transformers' code alone
    for part in (ours, own):
        part.open_cache(0, 64)
        part.open_cache(1, 64)
    for requests in ([(0, 20), (0, 3)], [(20, 1)], [(21, 2), (3, 1)]):
        found = run(ours, requests)
        assert attends == 0, "this part of a family's code runs"
        assert torch.equal(found, run(own, requests))
        assert attends > 0
        attends = 0


def changed(function: Any, before: str, after: str) -> Any:
    """A function of transformers' with another line."""
    source = inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(function)))
    assert source.count(before) == 1
    names = {**vars(llama)}
    exec(source.replace(before, after), names)
    return names["forward"]


MLP, ATTENTION = llama.LlamaMLP.forward, llama.LlamaAttention.forward
_WIDER = "(self.act_fn(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype)"
_LATER = "torch.cat([attn_output[..., :-1], 2 * attn_output[..., -1:]], dim=-1)"
_BY_POSITION = 'hidden_states * (1 if kwargs.get("position_ids") is None else kwargs["position_ids"].max())'


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (MLP, "self.up_proj(x)", "self.up_proj(x) * 2"),
        (MLP, "self.act_fn(self.gate_proj(x))", "self.gate_proj(x)"),
        (MLP, "self.up_proj(x)", "self.up_proj(x).clamp(max=1000)"),
        (MLP, "self.act_fn(self.gate_proj(x)) * self.up_proj(x)", _WIDER),
        (ATTENTION, "scaling=self.scaling,", "scaling=self.scaling, strange=1,"),
        (ATTENTION, "scaling=self.scaling,", "scaling=self.scaling / hidden_states.shape[1],"),
        (ATTENTION, "scaling=self.scaling,", "scaling=torch.tensor(self.scaling),"),
        (ATTENTION, "self.o_proj(attn_output)", f"self.o_proj({_LATER})"),
        (ATTENTION, "self.q_proj(hidden_states)", f"self.q_proj({_BY_POSITION})"),
        (ATTENTION, "self.v_proj(hidden_states)", "self.v_proj(hidden_states).float()"),
        (ATTENTION, "self.v_proj(hidden_states)", "(self.v_proj(hidden_states) * 1.001)"),
        (ATTENTION, "scaling=self.scaling,", ""),
        (ATTENTION, "self.o_proj(attn_output)", "self.o_proj(attn_output) + 1"),
        (ATTENTION, "cos, sin = position_embeddings", "cos, sin = position_embeddings[::-1]"),
        (ATTENTION, "self.v_proj(hidden_states)", "(self.v_proj(hidden_states) + 1)"),
        (ATTENTION, "self.v_proj(hidden_states)", "self.v_proj(hidden_states).clamp(-1000, 1000)"),
        (ATTENTION, "cos, sin = position_embeddings", "cos, sin = self.something"),
    ],
)
def test_code_that_does_anything_else_stays(function: Any, before: str, after: str) -> None:
    config = LlamaConfig(**SMALL, attn_implementation="flowspec_tree")
    with torch.device("meta"):
        made: Any = llama.LlamaMLP(config) if function is MLP else llama.LlamaAttention(config, 0)
    assert in_fewer_calls(made, function, FUNCTIONS, False) is not None
    assert in_fewer_calls(made, changed(function, before, after), FUNCTIONS, False) is None


def test_what_code_tells_the_attention_is_told_from_here() -> None:
    config = LlamaConfig(**SMALL, attn_implementation="flowspec_tree")
    with torch.device("meta"):
        made: Any = llama.LlamaAttention(config, 0)
    told = changed(ATTENTION, "scaling=self.scaling,", "scaling=self.scaling / 2, sliding_window=7,")
    found = in_fewer_calls(made, told, FUNCTIONS, False)
    assert found is not None
    names = inspect.getclosurevars(found).nonlocals["given"]["told"]
    assert names == {"scale": made.scaling / 2, "window": 7}
