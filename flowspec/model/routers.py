"""How a mixture's rows choose their experts, so that a row's choice and its bits follow from the row.

Each function gives what the routers of transformers' families give: logits, and each row's shares and
experts, `[rows, experts per token]`. Of two experts alike the lower number goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowspec.core.protocol.model_spec import Router
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.operations import over_their_sum, product, softmax

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_softmax(router: Any, hidden: torch.Tensor) -> Routed:
    """Shares in the rows' dtype, brought to a sum of 1 unless the config says otherwise."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits, shares, experts = _likeliest(router, rows)
    if getattr(router, "norm_topk_prob", True):
        shares = over_their_sum(shares)
    return logits, shares.to(rows.dtype), experts


def _by_softmax_to_one(router: Any, hidden: torch.Tensor) -> Routed:
    """Shares in float32, always brought to a sum of 1."""
    logits, shares, experts = _likeliest(router, hidden.reshape(-1, hidden.shape[-1]))
    return logits, over_their_sum(shares), experts


def _by_scaled_softmax_to_one(router: Any, rows: torch.Tensor) -> Routed:
    """Of rows that are normalised and scaled; shares in float32, brought to a sum of 1, times a scale of each
    expert (Gemma 4)."""
    scaled = router.norm(rows) * router.scale * router.scalar_root_size
    logits = product(scaled.float(), router.proj.weight.float()).to(rows.dtype)
    shares, experts = _first(softmax(logits.float()), router.config.top_k_experts)
    return logits, over_their_sum(shares) * router.per_expert_scale[experts], experts


def _by_softmax_of_chosen(router: Any, hidden: torch.Tensor) -> Routed:
    """Logits have a bias. Those of the experts that are chosen are brought to a sum of 1, in the rows'
    dtype."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = (product(rows.float(), router.weight.float()) + router.bias.float()).to(rows.dtype)
    chosen, experts = _first(logits.float(), router.top_k)
    return logits, softmax(chosen).to(rows.dtype), experts


def _likeliest(router: Any, rows: torch.Tensor) -> Routed:
    logits = product(rows.float(), router.weight.float()).to(rows.dtype)
    return logits, *_first(softmax(logits.float()), router.top_k)


def _by_sigmoid(router: Any, hidden: torch.Tensor) -> Routed:
    """Each expert has a share of its own. A bias counts in choosing only, among the experts of the groups
    whose two best are best."""
    rows = hidden.reshape(-1, hidden.shape[-1]).float()
    logits = product(rows, router.weight.float())
    scores = (1.0 + plain.exp(-logits)).reciprocal()
    choice = scores + router.e_score_correction_bias
    if router.num_group > 1:
        groups = choice.view(len(choice), router.num_group, -1)
        best, _ = _first(groups, 2)
        _, chosen = _first(best[..., 0] + best[..., 1], router.topk_group)
        is_open = torch.zeros_like(groups, dtype=torch.bool)
        is_open[torch.arange(len(groups))[:, None], chosen] = True
        choice = groups.masked_fill(~is_open, float("-inf")).flatten(1)
    _, experts = _first(choice, router.top_k)
    shares = scores.gather(1, experts)
    if router.norm_topk_prob:
        shares = shares / (plain.halves_sum(shares) + 1e-20)[:, None]
    return logits, shares * router.routed_scaling_factor, experts


def _first(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest, and where they are, by the last dimension."""
    found, places = scores.sort(dim=-1, descending=True, stable=True)
    return found[..., :count], places[..., :count]


ROUTERS: Mapping[Router, Callable[[Any, torch.Tensor], Routed]] = {
    "softmax": _by_softmax,
    "softmax to 1": _by_softmax_to_one,
    "scaled softmax to 1": _by_scaled_softmax_to_one,
    "softmax of chosen": _by_softmax_of_chosen,
    "sigmoid": _by_sigmoid,
}
