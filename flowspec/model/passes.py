"""Runs a slice's programs on a job's rows, and makes the programs of modules.

What a call gives beside hidden states: the angles of the rows' positions, and for each request where what it
holds lies, and what its rows see of that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, LayerSpec, ModelSpec
from flowspec.model import torch_layers
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import Cache, Part, kind_of
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.attention import BASE, TreeBatch, TreeCache, TreeRows
from flowspec.model.beside import Beside
from flowspec.model.gguf_layers import GgufEmbedding, GgufLinear, PlainGgufLinear
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.linear_attention import Walk, fading, walk_of, walk_past
from flowspec.model.products import Product, lanes16, pairs16
from flowspec.model.program import (
    CannotProgramError,
    LayerProgram,
    Linear,
    Matrix,
    NormPart,
    Numbers,
    Parts,
    Room,
    RouterPart,
    Stack,
    Table,
    numbers,
    program_of,
)
from flowspec.model.quantised import PanelInt4Linear, PanelInt8Linear, QuantisedLinear
from flowspec.model.spec import check_activation
from flowspec.model.torch_layers import TorchLayer

if TYPE_CHECKING:
    from flowspec.model.families import Family
    from flowspec.model.pieces import Angles, Pieces


class Pass:
    """Runs programs with the same rows: hidden states `[1, rows, width]`, which they change in place, what
    these see, and what comes and goes with them. There is one at a time in a room."""

    def __init__(
        self,
        room: Room,
        hidden: torch.Tensor,
        batch: TreeBatch,
        beside: Beside | None = None,
        embedding: torch.Tensor | None = None,
    ) -> None:
        self._room, self._batch, self._beside = room, batch, beside
        self._parts: dict[Any, tuple[int, list[tuple[Part, TreeRows]]]] = {}
        self._angles: Angles | None = None
        call = room.call
        call.hidden, call.rows = hidden.data_ptr(), hidden.shape[1]
        call.parts_count, call.threads = len(batch.requests), torch.get_num_threads()
        if beside is not None:
            call.tokens = beside.tokens.data_ptr()
            call.going, call.between_going = beside.going.data_ptr(), beside.going.shape[1]
            embedding = beside.embedding
        if embedding is not None:
            call.embedding, call.between_embeddings = embedding.data_ptr(), embedding.stride(1)

    def run(self, program: LayerProgram, angles: Angles) -> None:
        call = self._room.call
        if angles is not self._angles:
            cosine, sine = self._angles = angles
            call.cosine, call.sine, call.angles = cosine.data_ptr(), sine.data_ptr(), cosine.shape[2]
        parts = self._parts.get(program.view)
        if parts is None:
            parts = self._parts[program.view] = self._made(program)
        call.parts, requests = parts
        for part, rows in requests:
            part.cache = rows.cache.address(program.source)
        mixer = program.view[1]
        if isinstance(mixer, DeltaRule):
            for part, rows in requests:
                _step(part, walk_of(rows, program.source, mixer.length))
        self._room.run(program.pointer)

    def _made(self, program: LayerProgram) -> tuple[int, list[tuple[Part, TreeRows]]]:
        array, (window, mixer) = (Part * len(self._batch.requests))(), program.view
        found = []
        for part, request in zip(array, self._batch.requests, strict=True):
            rows = request.of(program.source)
            assert rows is request or window is not None, "a layer without a window holds all"
            part.first, part.rows, part.slots = rows.first, len(rows.slots), rows.slots.data_ptr()
            if mixer is None:
                sight = rows.sight(window)
                order, ends = sight.order()
                part.seen, part.order, part.ends = sight.seen.data_ptr(), order.data_ptr(), ends.data_ptr()
                part.high, part.blocks = sight.seen.shape[1], len(ends)
            elif isinstance(mixer, Convolution):
                part.lines = rows.line(mixer.length).data_ptr()
            found.append((part, rows))
        return ctypes.addressof(array), found  # a part holds the array that it is of


def _step(part: Part, walk: Walk) -> None:
    part.lines, part.steps = walk.lines.data_ptr(), walk.steps.data_ptr()
    part.nodes, part.steps_count, part.places = len(walk.lines), len(walk.steps), walk.places


class Layers:
    """Those of a draft head, which run behind each other."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        specs: Sequence[LayerSpec],
        family: Family,
        dtype: torch.dtype,
        product: Product,
    ) -> None:
        self._room = Room(compiled.library())
        self._layers = [
            layer_of(module, spec, family, dtype, product, place)
            for place, (module, spec) in enumerate(zip(modules, specs, strict=True))
        ]

    def run(
        self,
        hidden: torch.Tensor,
        angles: Sequence[Angles],
        batches: Sequence[TreeBatch],
        embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of hidden states `[1, rows, width]`, with each layer's angles and what its rows see, and the rows'
        embeddings where layers read these."""
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # programs add to it in place
        passes: dict[int, Pass] = {}
        for layer, turned, batch in zip(self._layers, angles, batches, strict=True):
            if isinstance(layer, TorchLayer):
                hidden = layer.run(hidden[0], turned, batch, embedding=embedding)[None]
                continue
            if id(batch) not in passes:
                passes[id(batch)] = Pass(self._room, hidden, batch, embedding=embedding)
            passes[id(batch)].run(layer, turned)
        return hidden


def pass_by(room: Room, program: LayerProgram | TorchLayer, cache: TreeCache, passed: Sequence[int]) -> None:
    """Brings the state `BASE` to the end of these slots, which `ClearSlots` names."""
    if isinstance(program, TorchLayer):
        torch_layers.pass_by(program, cache, passed)
        return
    mixer, layer = program.view[1], program.source
    assert isinstance(mixer, DeltaRule)
    assert program.past is not None
    walk = walk_past(layer, cache, passed, mixer.length)
    inputs = cache.inputs[cache.places[layer]]
    state = cache.states[cache.places[layer], BASE]
    where = Cache(inputs=inputs.data_ptr(), inputs_width=inputs.shape[1], state=state.data_ptr())
    part, call = Part(cache=ctypes.addressof(where)), room.call
    _step(part, walk)
    call.rows, call.parts_count, call.parts, call.threads = 0, 1, ctypes.addressof(part), 1
    room.run(ctypes.byref(program.past))


def layers_of(pieces: Pieces, model: ModelSpec, dtype: torch.dtype) -> list[LayerProgram | TorchLayer]:
    """Those of a slice. Raises `InputError` where there is no operation for an activation."""
    first, specs = pieces.span.first, model.layers[pieces.span.first : pieces.span.end]
    check_activation(pieces.config, specs)
    going, at = {}, model.carried_at(pieces.span.end).embedding
    for source in model.carried_at(pieces.span.end).sources:
        going[source - first] = at
        at += model.layers[source].kv.numbers
    made = []
    for place, (layer, spec) in enumerate(zip(pieces.layers, specs, strict=True)):
        own = replace(spec, source=spec.source - first)
        given = pieces.family, dtype, pieces.product, place, going.get(place)
        made.append(layer_of(layer, own, *given))
    return made


def layer_of(
    module: nn.Module,
    spec: LayerSpec,
    family: Family,
    dtype: torch.dtype,
    product: Product,
    place: int = 0,
    going: int | None = None,
) -> LayerProgram | TorchLayer:
    """A program on a CPU, else what torch computes; `place`, `going` and the spec's source as in
    `program_of`."""
    if not _is_on_cpu(module):
        return TorchLayer(module, spec, family, product, place, going)
    parts = parts_of(module, family.layer_names, product)
    return program_of(parts, spec, family.norm, kind_of(dtype), place, going)


def _is_on_cpu(module: nn.Module) -> bool:
    return all(each.device.type == "cpu" for each in module.parameters())


def parts_of(layer: nn.Module, names: Mapping[str, str], product: Product) -> Parts:
    """Those of a module; `names` are those that its family calls otherwise."""
    common: dict[str, str] = {"mlp.gate": "mlp.router", **{own: name for name, own in names.items()}}
    found: dict[str, Any] = {}
    modules = dict(layer.named_modules())
    for own, module in modules.items():
        name = common.get(own) or str(own)
        made = _part_of(module, product)
        if made is not None:
            found[name] = made
        found |= {
            f"{name}.{part}": value for part, value in _more_of(module, name.rpartition(".")[2], product)
        }
    if "self_attn.v_norm" in modules:
        eps, width = modules["self_attn.v_norm"].eps, found["self_attn.q_norm"].weights
        ones = torch.ones(width.count, dtype=width.held.dtype)
        found["self_attn.v_norm"] = NormPart(weights=numbers(ones), eps=eps)
    scalar, own_input = getattr(layer, "layer_scalar", None), modules.get(LAYER_INPUT)
    if isinstance(scalar, torch.Tensor):
        found["layer_scalar"] = scalar.item()
    if own_input is not None:
        scale, dtype = torch.tensor(own_input.table_scale), found[f"{LAYER_INPUT}.norm"].weights.held.dtype
        found[f"{LAYER_INPUT}.table"] = _table_of(own_input.table)
        found[f"{LAYER_INPUT}.factor"] = scale.to(dtype).item()
    return found


def _more_of(module: Any, name: str, product: Product) -> Iterator[tuple[str, Any]]:
    """What of a module is no part of its own, by what that is called in it."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for convolution in module.children():
        if isinstance(convolution, torch.nn.Conv1d):
            yield "taps", numbers(convolution.weight[:, 0].float().t().contiguous())
            if convolution.bias is not None:
                yield "bias", numbers(convolution.bias.float())
    if "dt_bias" in own:
        yield "rates", numbers(torch.cat([fading(module), own["dt_bias"].float()]))
    if "sinks" in own:
        yield "sinks", numbers(own["sinks"].float())
    if name == "experts":
        for stack in ("gate_up_proj", "down_proj"):
            yield stack, _stack_of(module, stack, product)


def _part_of(module: Any, product: Product) -> Linear | NormPart | RouterPart | None:
    if isinstance(module, torch.nn.Linear):
        return linear_of(module, product)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if type(module).__name__.endswith("Router"):
        return _router_of(module)
    if eps is None:
        return None
    if "weight" in module._parameters:
        return NormPart(weights=numbers(module.weight), eps=eps)
    return None


def linear_of(linear: Any, product: Product) -> Linear:
    inputs, outputs, order = linear.in_features, linear.out_features, getattr(linear, "order", None)
    return Linear(
        inputs=inputs,
        outputs=outputs,
        matrices=tuple(_matrices(linear, product)),
        bias=None if linear.bias is None else numbers(linear.bias),
        order=None if order is None else numbers(order.long()),
        held=linear,
    )


def _matrices(linear: Any, product: Product) -> list[Matrix]:
    inputs, outputs = linear.in_features, linear.out_features
    if isinstance(linear, GgufLinear) and not isinstance(linear, PlainGgufLinear):
        found, first = [], 0
        for part in linear.parts:
            found.append(_packed(part.kind, part.panels, inputs, part.outputs, first))
            first += part.outputs
        return found
    if isinstance(linear, PanelInt4Linear):
        return [_packed("Q4_0", linear._panels, inputs, outputs, 0)]
    if isinstance(linear, PanelInt8Linear):
        where, scales = numbers(linear._panels).address, numbers(linear._scales).address
        return [Matrix("digits", 0, where, inputs, outputs, 0, ("digits", 0, False), scales)]
    if isinstance(linear, QuantisedLinear) or product not in (lanes16, pairs16):
        raise CannotProgramError
    return [_plain(product, numbers(linear.weight), inputs, outputs)]


def _plain(product: Any, given: Numbers, inputs: int, outputs: int, begin: int = 0) -> Matrix:
    how = "pairs" if product is pairs16 else "linear"
    kind = 0 if how == "pairs" else given.kind
    return Matrix(how, kind, given.address + begin, inputs, outputs, 0, (how, 0, False))


def _packed(name: str, panels: torch.Tensor, inputs: int, outputs: int, first: int) -> Matrix:
    form = FORMS[name]
    is_signed = bool(form.table) or form.bits == 8
    prepared = "packed", -1 if is_signed else form.offset, form.halves > 1
    return Matrix("packed", form.number, numbers(panels).address, inputs, outputs, first, prepared)


def _stack_of(experts: Any, name: str, product: Product) -> Stack:
    given, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    own = None if bias is None else numbers(bias)
    if isinstance(given, torch.nn.ModuleList):
        linears = tuple(linear_of(linear, product) for linear in given)
        if any(linear.order is not None for linear in linears):
            raise CannotProgramError
        return Stack(linears=linears, bias=own)
    if product not in (lanes16, pairs16):
        raise CannotProgramError
    count, outputs, inputs = given.shape
    whole, size = numbers(given.detach()), outputs * inputs * given.element_size()
    matrices = [_plain(product, whole, inputs, outputs, place * size) for place in range(count)]
    alike = {"inputs": inputs, "outputs": outputs, "held": given}
    return Stack(linears=tuple(Linear(matrices=(each,), **alike) for each in matrices), bias=own)


def _router_of(router: Any) -> RouterPart:
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is not None and correction.dtype != torch.float32:
        raise CannotProgramError
    if hasattr(router, "per_expert_scale"):
        return RouterPart(
            weights=numbers(router.proj.weight),
            norm=NormPart(weights=numbers(router.scale.detach()), eps=router.norm.eps),
            factor=router.scalar_root_size,
            scales=numbers(router.per_expert_scale.detach().float()),
        )
    bias = getattr(router, "bias", None)
    return RouterPart(
        weights=numbers(router.weight),
        bias=None if bias is None else numbers(bias),
        correction=None if correction is None else numbers(correction),
    )


def _table_of(table: Any) -> Table:
    if not isinstance(table, GgufEmbedding):
        return Table(weights=numbers(table.weight))
    (part,) = table.parts
    return Table(weights=numbers(part.panels), form=FORMS[part.kind].number)
