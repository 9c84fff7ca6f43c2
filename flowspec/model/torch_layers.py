"""Layers as torch computes them, on GPUs: as `plain.layer` defines a layer, with torch's products and, where
there are such, kernels of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.core.protocol.model_spec import DeltaRule, LayerSpec
from flowspec.model.arithmetic import operations, plain
from flowspec.model.arithmetic.norms import Norm
from flowspec.model.arithmetic.operations import attention, delta_rule, norm, product, store
from flowspec.model.attention import BASE, NEAR, TreeBatch, TreeCache
from flowspec.model.beside import Beside
from flowspec.model.families import Family
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.linear_attention import fading, walk_of, walk_past
from flowspec.model.products import Product

Rows = Callable[[torch.Tensor], torch.Tensor]
STACKS = ("gate_up_proj", "down_proj")


class TorchLayer:
    """A module's layer. Its spec's `source` counts from the slice's first layer, as its `place` does; its
    keys and values go on from number `going`, if they do."""

    def __init__(
        self,
        module: nn.Module,
        spec: LayerSpec,
        family: Family,
        multiply: Product,
        place: int = 0,
        going: int | None = None,
    ) -> None:
        assert spec.dense is not None, "there is a definition of everything"
        self.spec, self.place, self.going = spec, place, going
        self._modules = dict(module.named_modules())
        self.parts = _parts_of(self._modules, family, multiply, spec)

    def run(
        self,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: TreeBatch,
        beside: Beside | None = None,
        embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[rows, width]` from hidden states of that shape; `embedding` `[1, rows, width]` where nothing else
        is beside them."""
        token: plain.Token | None = None
        input_: Any = self._modules.get(LAYER_INPUT)
        embedding = embedding if beside is None else beside.embedding
        if embedding is not None:
            token = plain.Token(embedding[0])
            if input_ is not None and beside is not None:
                scale = torch.tensor(input_.table_scale).to(hidden.dtype).item()
                token = plain.Token(embedding[0], input_.table(beside.tokens), scale)
        held = _Held(self, batch, None if beside is None else beside.going)
        return plain.layer(self.spec, self.parts, hidden, angles, held, token)


class _Held:
    """What a job's requests hold of a layer (`plain.Holder`)."""

    def __init__(self, layer: TorchLayer, batch: TreeBatch, going: torch.Tensor | None) -> None:
        self._layer, self._batch, self._going = layer, batch, going

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        spec, source = self._layer.spec, self._layer.spec.source
        assert spec.dense is not None
        first = self._layer.going
        if keys is not None and values is not None and self._going is not None and first is not None:
            both = torch.cat([keys.flatten(1), values.flatten(1)], dim=1)
            self._going[:, first : first + both.shape[1]] = both
        outputs = []
        for request in self._batch.requests:
            rows = request.of(source)
            span = slice(rows.first, rows.first + len(rows.slots))
            held_keys, held_values, steps = rows.cache.of(source)
            if keys is not None and values is not None:
                new = keys[span].transpose(0, 1), values[span].transpose(0, 1)
                store(rows.slots, *new, held_keys, held_values, steps)
            held = held_keys, held_values, rows.sight(spec.window or None)
            scale, cap = spec.dense.scale, spec.dense.cap or None
            outputs.append(attention(queries[span], *held, scale, cap, steps, sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def convolve(self, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs = []
        for request in self._batch.requests:
            rows = request.of(self._layer.place)
            held = rows.cache.inputs[rows.cache.places[self._layer.place]]  # [slots, width]
            held.index_copy_(0, rows.slots, inputs[rows.first : rows.first + len(rows.slots)])
            seen = plain.seen_inputs(held, rows.line(taps.shape[1]))
            outputs.append(plain.convolution(seen, taps, bias))
        return torch.cat(outputs)

    def sum_up(
        self, inputs: torch.Tensor, mixer: DeltaRule, vectors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        outputs, layer = [], self._layer.place
        for request in self._batch.requests:
            rows = request.of(layer)
            place = rows.cache.places[layer]
            held, states = rows.cache.inputs[place], rows.cache.states[place]
            held.index_copy_(0, rows.slots, inputs[rows.first : rows.first + len(rows.slots)])
            walk = walk_of(rows, layer, mixer.length)
            places = states.new_empty((walk.places, *states.shape[1:]))
            places[0] = states[NEAR]
            outputs.append(delta_rule(plain.delta_rows(mixer, held, walk.lines, vectors), places, walk.steps))
            states[NEAR] = places[0]
        return torch.cat(outputs)


def pass_by(layer: TorchLayer, cache: TreeCache, passed: Sequence[int]) -> None:
    """As `passes.pass_by`."""
    assert layer.spec.dense is not None
    mixer, place = layer.spec.dense.mixer, cache.places[layer.place]
    assert isinstance(mixer, DeltaRule)
    walk = walk_past(layer.place, cache, passed, mixer.length)
    rows = plain.delta_rows(mixer, cache.inputs[place], walk.lines, layer.parts.vectors)
    delta_rule(rows, cache.states[place, BASE][None], walk.steps)


def _parts_of(
    modules: Mapping[str, nn.Module], family: Family, multiply: Product, spec: LayerSpec
) -> plain.Parts:
    common = {own: name for name, own in family.layer_names.items()}
    products, norms, vectors, experts = dict[str, Rows](), dict[str, Rows](), dict[str, Any](), list[Any]()
    module: Any
    for own, module in modules.items():
        name = common.get(own, own)
        leaf = name if name == f"{LAYER_INPUT}.norm" else name[name.rfind(".") + 1 :]
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if isinstance(module, nn.Linear):
            products[leaf] = partial(_multiplied, linear=module, multiply=multiply)
        elif isinstance(module, nn.Conv1d):
            vectors["conv"] = module.weight[:, 0].float()
            vectors["conv.bias"] = None if module.bias is None else module.bias.float()
        elif type(module).__name__.endswith("Router"):
            products["gate"] = partial(_routed, router=module, is_wide=family.router == "sigmoid")
            for vector in ("e_score_correction_bias", "per_expert_scale"):
                if hasattr(module, vector):
                    vectors[vector] = getattr(module, vector).detach().float()
        elif eps is not None and not own.endswith("router.norm"):
            how = "cast, scale" if own == "linear_attn.norm" else family.norm
            norms[leaf] = partial(_normed, module=module, eps=eps, how=how)
        if hasattr(module, "dt_bias"):
            vectors |= {"fading": fading(module), "dt_bias": module.dt_bias.float()}
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            vectors["sinks"] = module.sinks.float()
        if leaf == "experts":
            assert spec.dense is not None
            assert spec.dense.mixture is not None
            for number in range(spec.dense.mixture.experts):
                of_one = partial(_of_expert, experts=module, number=number, multiply=multiply)
                experts.append({stack: partial(of_one, name=stack) for stack in STACKS})
    scalar: Any = getattr(modules[""], "layer_scalar", None)
    vectors["layer_scalar"] = None if scalar is None else scalar.item()
    return plain.Parts(products=products, norms=norms, vectors=vectors, experts=experts, ops=operations)


def _multiplied(rows: torch.Tensor, linear: Any, multiply: Product) -> torch.Tensor:
    """By a layer that is packed, or not."""
    if linear.weight is None:
        found: torch.Tensor = linear.forward(rows)
        return found
    return multiply(rows, linear.weight, linear.bias)


def _of_expert(rows: torch.Tensor, experts: Any, number: int, name: str, multiply: Product) -> torch.Tensor:
    """A bias, if there is one, is added before the result is rounded."""
    matrices, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    bias = None if biases is None else biases[number]
    if not isinstance(matrices, nn.ModuleList):
        return multiply(rows, matrices[number], bias)
    layer: Any = matrices[number]
    if bias is None:
        found: torch.Tensor = layer.forward(rows)
        return found
    wide: torch.Tensor = layer.forward(rows.float()) + bias
    return wide.to(rows.dtype)


def _normed(rows: torch.Tensor, module: Any, eps: float, how: Norm) -> torch.Tensor:
    weight = module._parameters.get("weight")
    if weight is None:
        weight = rows.new_ones(rows.shape[-1])
    return norm(rows, weight, eps, how)


def _routed(rows: torch.Tensor, router: Any, is_wide: bool) -> torch.Tensor:
    """Logits `[rows, experts]`, in float32 where they stay so."""
    bias = getattr(router, "bias", None)
    if hasattr(router, "proj"):
        rows = norm(rows, router.scale, router.norm.eps, "cast, scale") * router.scalar_root_size
        router = router.proj
    found = product(rows.float(), router.weight.float())
    found = found if bias is None else found + bias.float()
    return found if is_wide else found.to(rows.dtype)
