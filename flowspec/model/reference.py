"""The model as transformers computes it, in float32: what answers are to be faithful to.

No code of ours takes part: transformers' own layers, its own attention (SDPA, or eager where SDPA lacks a
cap), its own cache. Of a precision only the rounding of weights is ours: these are rounded as slices round
them, widened to float32 again, and put into plain linear layers. So an error in a packed layout, in a kernel
or in an attention is on one side only.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, FILED, Q8_0, Q8_0_NUMBERS, cached_as
from flowspec.core.text_before import TextBefore
from flowspec.model.arithmetic.packed import FORMS, numbers_of
from flowspec.model.families import FAMILIES, PLAIN_ROOT, Family
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.config import MODEL_TYPES
from flowspec.model.gguf.file import tell_gguf_version
from flowspec.model.gguf.names import STORED_FADING, parts_of
from flowspec.model.gpu import DTYPES, array_of, tensor_of
from flowspec.model.imports import IMPORTING
from flowspec.model.layer_by_layer import together, whole_name
from flowspec.model.prequantised.scheme import QUANTISED
from flowspec.model.rounding import ROUNDINGS, Rounding
from flowspec.model.sampler import F32, Sampler
from flowspec.model.tensors import Tensors

ROUTER_BITS = 4
"""Of each input of a router, to swap experts: then about every eighth token has others in some layer."""
MISREAD = ("gpt-oss", "gemma4")
"""Architectures of GGUF files of which transformers does not find all: experts, scales of layers."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj")
"""Modules of transformers' that make them. One that makes queries, too, has these rounded as well."""


class Reference:
    """A whole model through transformers, with weights as a precision holds them; remembers its answers."""

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        with IMPORTING:
            from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()  # it advises faster libraries; the plain one is wanted
        options = {"experts_implementation": "eager"}
        if getattr(files.config().get_text_config(), "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = (
                "eager"  # older transformers take SDPA for Gemma 2, which has no cap
            )
        if files.is_packed or files.gguf is not None:
            self._model: Any = _unpacked_model(files, **options).eval()
        else:
            folder = files.path("config.json").parent
            for name in sorted(set(files.file_map().values())):
                files.path(name)
            self._model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                **options,
            ).eval()
        self._answers: dict[tuple[Any, ...], list[int]] = {}
        self._packed = _packed_parameters(self._model, files) if files.is_packed else frozenset()
        self._tensors = files.tensors()
        self._family = FAMILIES[files.config().model_type]
        self._wide = _wide_parameters(self._model, files)
        self.round_to(dtype)

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def head(self) -> torch.nn.Linear:
        """`lm_head`."""
        head: torch.nn.Linear = self._model.get_output_embeddings()
        return head

    def layer(self, index: int) -> torch.nn.Module:
        """A layer of the decoder, as transformers has it."""
        layer: torch.nn.Module = self._model.get_decoder().layers[index]
        return layer

    def layer_projection(self, index: int, width: int) -> torch.Tensor:
        """Of what all layers take of a token's embedding the part of one, `[width, hidden]` (Gemma 4)."""
        matrix: torch.Tensor = self._model.get_decoder().per_layer_model_projection.weight
        return matrix[index * width : (index + 1) * width]

    @torch.inference_mode()
    def round_to(self, dtype: str) -> None:
        """Rounds all weights as slices of that precision hold them; they stay float32 numbers."""
        self._answers.clear()
        held = DTYPES[ACTIVATIONS[dtype]]
        kept = self._wide | (self._packed if dtype == FILED else frozenset())
        for parameter in self._model.parameters():
            if id(parameter) not in kept:
                parameter.copy_(parameter.to(held))
        if dtype in ROUNDINGS:
            self._round_matrices(ROUNDINGS[dtype], held)
        if dtype == FILED:
            self._round_loose()

    def _round_loose(self) -> None:
        """What a quantised checkpoint has in other numbers than layers compute with is rounded to those."""
        parameters = dict(self._model.named_parameters())
        rounded = {
            ours: self._rounded_anew(name)
            for name, ours in plain_names(self._family, self._tensors).items()
            if id(parameters.get(whole_name(ours))) in self._packed and self._tensors.is_rounded_anew(name)
        }
        for name, values in together(rounded).items():
            parameters[name].copy_(values)
        for index, layer in enumerate(self._model.get_decoder().layers):
            for name in self._family.stacked:
                values_of_all = self._rounded_experts(index, name)
                if values_of_all is not None:
                    layer.get_parameter(name).copy_(values_of_all)

    def _rounded_experts(self, layer: int, name: str) -> torch.Tensor | None:
        """A layer's parameter of all experts, `[experts, out, in]`, of matrices that are rounded anew; None
        where it has none such."""
        prefix = f"{self._family.root(self._tensors).prefix}layers.{layer}."
        for way in self._family.ways_to_stack(name):
            experts: list[torch.Tensor] = []
            while (single := prefix + way[0].format(len(experts))) in self._tensors:
                if len(self._tensors.shape(single)) != 2 or not self._tensors.is_rounded_anew(single):
                    return None  # a bias is no matrix
                parts = [self._rounded_anew(prefix + part.format(len(experts))) for part in way]
                experts.append(torch.cat(parts))
            if experts:
                return torch.stack(experts)
        return None

    def _rounded_anew(self, name: str) -> torch.Tensor:
        rows, columns = shape = self._tensors.shape(name)
        panels = tensor_of(self._tensors.panels(name, shape))
        found: torch.Tensor = numbers_of(FORMS[self._tensors.form(name)], panels)
        return found[:rows, :columns]

    def _round_matrices(self, rounding: Rounding, held: torch.dtype) -> None:
        """What slices pack: the linear layers of the decoder and `lm_head`, and experts; not the towers of a
        multimodal model.
        """
        head = self.head
        values = head.weight.clone()  # a tied embedding keeps its own
        head.weight = torch.nn.Parameter(values, requires_grad=False)
        for path, module in [*self._model.get_decoder().named_modules(), ("lm_head", head)]:
            is_linear = type(module) is torch.nn.Linear and not is_of_router(path)
            for name, weight in module.named_parameters(recurse=False):
                is_expert = weight.dim() == 3 and not isinstance(module, torch.nn.Conv1d)
                if (is_linear and name == "weight") or is_expert:
                    if is_inputs_first(module):
                        weight = weight.transpose(1, 2)
                    rounded = rounding.round(array_of(weight.to(held).flatten(0, -2)))
                    widened = tensor_of(rounding.widen(rounded, weight.shape[-1]))
                    weight.copy_(widened.view_as(weight))

    @contextlib.contextmanager
    def rounding_to(self, dtype: str, cache: str = CACHE_AUTO) -> Iterator[None]:
        """While it lasts, what layers and their parts compute is rounded as that precision holds it, at each
        of their ends, and keys and values as such a `cache` does.

        So it shows how far rounding alone moves this model's logits, without a kernel for such numbers. In a
        mixture the last bits may choose an expert, which is rare and moves logits far: there routers see
        less, so that it happens. Float32 is not rounded.
        """
        held, kept = DTYPES[ACTIVATIONS[dtype]], cached_as(cache, dtype)
        if held == torch.float32 == DTYPES.get(kept):
            yield
            return

        def rounded(module: torch.nn.Module, given: Any, made: Any) -> Any:
            is_computed = isinstance(made, torch.Tensor) and made.is_floating_point()
            return made.to(held).float() if is_computed else None

        def blurred(router: torch.nn.Module, given: tuple[Any, ...]) -> Any:
            fraction, exponent = torch.frexp(given[0])
            return torch.ldexp((fraction * 2**ROUTER_BITS).round() / 2**ROUTER_BITS, exponent), *given[1:]

        def cached(module: torch.nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            return _as_levels(made) if kept == Q8_0 else made.to(DTYPES[kept]).float()

        modules = [*self._model.get_decoder().modules(), self.head]
        hooks = [module.register_forward_hook(rounded) for module in modules]
        hooks += [
            module.register_forward_hook(cached)
            for name, module in self._model.get_decoder().named_modules()
            if name.rpartition(".")[2] in KEYS_AND_VALUES
        ]
        mixtures = [module for module in modules if hasattr(module, "experts")]
        routers = [module.gate if hasattr(module, "gate") else module.router for module in mixtures]
        hooks += [router.register_forward_pre_hook(blurred) for router in routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def generate(
        self, prompt: tuple[int, ...], sampling: Sampling, new_tokens_max: int, stop_ids: frozenset[int]
    ) -> list[int]:
        """The new tokens, the stop token included if there is one."""
        key = (prompt, sampling, new_tokens_max, stop_ids)
        if key in self._answers:
            return self._answers[key]
        sampler = Sampler(sampling, self.vocabulary_size)
        tokens: list[int] = []
        fed, cache, cache_called = list(prompt), None, cache_name(self._model)
        while len(tokens) < new_tokens_max and not (tokens and tokens[-1] in stop_ids):
            out = self._model(
                input_ids=torch.tensor([fed]), use_cache=True, logits_to_keep=1, **{cache_called: cache}
            )
            cache = out[cache_called]
            text = TextBefore(np.array([*prompt, *tokens], dtype=np.int64), len(prompt))
            tokens.append(sampler.draw(out.logits[0, -1].numpy(), len(prompt) + len(tokens), text))
            fed = tokens[-1:]
        self._answers[key] = tokens
        return tokens

    @torch.inference_mode()
    def forced_logits(self, prompt: tuple[int, ...], answer: list[int]) -> list[F32]:
        """Logits after the prompt and after each token of the answer, from one pass without a cache."""
        out = self._model(
            input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False, logits_to_keep=len(answer) + 1
        )
        return list(out.logits[0].numpy())


def is_of_router(name: str) -> bool:
    """Whether a parameter or a module, by its name, belongs to a router: these are never packed."""
    return ".router." in f".{name}."


def cache_name(model: Any) -> str:
    """What a model of transformers calls its cache; another word from 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _as_levels(numbers: torch.Tensor) -> torch.Tensor:
    """Each 32 of a row's numbers as whole multiples of a 127th of the largest, that step in float16."""
    width = numbers.shape[-1]
    filled = F.pad(numbers, (0, -width % Q8_0_NUMBERS))
    groups = filled.view(*numbers.shape[:-1], -1, Q8_0_NUMBERS)
    steps = (groups.abs().amax(dim=-1, keepdim=True) / 127).half().float()
    rounded = torch.where(steps > 0, groups / steps, 0.0).round() * steps
    return rounded.view_as(filled)[..., :width]


def is_inputs_first(module: torch.nn.Module) -> bool:
    """Whether a module holds its experts as `[experts, in, out]`, the outputs of gate and up in turns."""
    return bool(getattr(module, "is_transposed", False))


def joined(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one tensor for all experts of a layer, and for all layers, where transformers has no more names,
    instead of single ones."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = together(weights)
    joins_itself = get_checkpoint_conversion_mapping(model.config.model_type) is not None

    def stacked(path: str, experts: int, part: str, leaf: str = "weight") -> torch.Tensor:
        return torch.stack([found.pop(f"{path}.{expert}.{part}.{leaf}") for expert in range(experts)])

    for path, module in model.named_modules():
        is_apart = not joins_itself and f"{path}.0.gate_proj.weight" in found
        if is_inputs_first(module):
            for leaf, suffix in (("weight", ""), ("bias", "_bias")):
                names = ("gate_proj", "up_proj", "down_proj")
                gate, up, down = (stacked(path, module.num_experts, name, leaf) for name in names)
                in_turns = torch.stack([gate, up], dim=2).flatten(1, 2)
                for name, values in (("gate_up_proj", in_turns), ("down_proj", down)):
                    values = values.transpose(1, 2).contiguous() if leaf == "weight" else values
                    found[f"{path}.{name}{suffix}"] = values
        elif is_apart or f"{path}.0.gate_up_proj.weight" in found:
            parts = ("gate_proj", "up_proj") if is_apart else ("gate_up_proj",)
            both = [stacked(path, module.num_experts, part) for part in parts]
            found[f"{path}.gate_up_proj"] = torch.cat(both, dim=1)
            found[f"{path}.down_proj"] = stacked(path, module.num_experts, "down_proj")
    return found


def plain_names(family: Family, tensors: Tensors) -> dict[str, str]:
    """What a model that is the decoder alone calls each tensor of a checkpoint, by its name there, which may
    be that of a part of a multimodal model."""
    root = family.root(tensors)
    found = {}
    for name in tensors:
        is_inside = name.startswith(root.prefix)
        found[name] = PLAIN_ROOT.prefix + name.removeprefix(root.prefix) if is_inside else name
    return found | ({root.lm_head: PLAIN_ROOT.lm_head} if root.lm_head in found else {})


def _wide_parameters(model: Any, files: ModelFiles) -> frozenset[int]:
    """Those, by identity, that slices hold in float32 in every precision: how fast states fade, where a file
    has more than its logarithm."""
    tensors = files.tensors()
    named = model.named_parameters()
    return frozenset(
        id(each) for name, each in named if name.endswith("_log") and name.removesuffix("_log") in tensors
    )


def _packed_parameters(model: Any, files: ModelFiles) -> frozenset[int]:
    """The parameters, by identity, whose numbers are those of packed tensors: slices hold these as they
    are."""
    tensors, family = files.tensors(), FAMILIES[files.config().model_type]
    packed = {whole_name(ours) for name, ours in plain_names(family, tensors).items() if tensors.form(name)}
    experts = {name.partition(".experts.")[0] for name in packed if ".experts." in name}
    found = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            is_matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
            is_expert = parameter.dim() == 3 and name.partition(".experts.")[0] in experts
            is_packed = is_matrix and name in packed and not is_of_router(name)
            found += [id(parameter)] if is_expert or is_packed else []
    return frozenset(found)


def _unpacked_model(files: ModelFiles, **options: Any) -> Any:
    """A model whose files are packed, all of it unpacked: a GGUF file as transformers itself reads it; as we
    read it where it cannot (parts, Llama with a window, architectures that it does not know), and so a
    checkpoint that another tool quantised, for which transformers needs that tool."""
    with IMPORTING:
        from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint

    path, config = files.gguf, files.config()
    for name in QUANTISED:
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    is_known = path is not None and config.model_type.removesuffix("_text") in GGUF_SUPPORTED_ARCHITECTURES
    if (
        path is not None
        and is_known
        and len(parts_of(path.name)) == 1
        and config.model_type == MODEL_TYPES[files.gguf_architecture]
        and files.gguf_architecture not in MISREAD
    ):
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
            tell_gguf_version()
            weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    else:
        own = files.tensors()
        names = plain_names(FAMILIES[config.model_type], own)
        weights = joined(
            empty, {ours: tensor_of(own.load(name, own.shape(name))) for name, ours in names.items()}
        )
        for name in [name for name in weights if name.endswith(STORED_FADING)]:
            weights[f"{name}_log"] = (-weights.pop(name)).double().log().float()
    # Not `gguf_file=`, which wants the accelerate package, does the same, and takes a config with less in it.
    return type(empty).from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, **options
    )
