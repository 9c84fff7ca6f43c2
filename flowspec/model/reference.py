"""The model as transformers computes it, in float32: what answers are to be faithful to.

No code of ours takes part: transformers' own layers, its own attention (SDPA, or eager where SDPA lacks a
cap), its own cache. Of a precision only the rounding of weights is ours: these are rounded as slices round
them, widened to float32 again, and put into plain linear layers. So an error in a packed layout, in a kernel
or in an attention is on one side only.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, FILED, Q8_0, cached_as, is_packed
from flowspec.model.accelerator import importing
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.arithmetic.packed import FORMS, GROUP, numbers_of
from flowspec.model.families import FAMILIES, PLAIN_ROOT, Family
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.config import MODEL_TYPES
from flowspec.model.gguf.file import parts_of, tell_gguf_version
from flowspec.model.gguf.tensors import STORED_FADING
from flowspec.model.gpu import DTYPES, array_of, tensor_of
from flowspec.model.joined_tensors import SHARED
from flowspec.model.layer import LAYER_INPUT
from flowspec.model.prequantised import QUANTISED
from flowspec.model.rounding import ROUNDINGS, Rounding
from flowspec.model.tensors import Tensors

ROUTER_BITS = 4  # of each input of a router: then about every eighth token has other experts somewhere
MISREAD = ("gpt-oss", "gemma4")  # in whose GGUF files transformers does not find experts, scales of layers
EXPERTS = ".experts."
FINE = ("v_proj", "qkv_proj", "in_proj", "in_proj_qkv", "lm_head")
"""Modules of transformers' whose rows slices round finely where they are packed; with them keys that are
values, too."""
INPUTS = "in_proj"  # how modules are called that make what layers hold in the place of keys and values
KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj")
"""Modules of transformers' that make them. One that makes queries, too, has these rounded as well."""


class Reference:
    """A whole model through transformers, with weights as a precision holds them."""

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        self.model: Any = _load(files).eval()
        self.head: torch.nn.Linear = self.model.get_output_embeddings()
        self._tensors = files.tensors()
        self._family = FAMILIES[files.config().model_type]
        self._names = plain_names(self._family, self._tensors)
        marks = {ours: torch.zeros(1, 1) for name, ours in self._names.items() if self._tensors.form(name)}
        packed = joined(self.model, self._family, marks) if files.is_packed else {}
        self._packed = {name: each for name, each in self._matrices() if name in packed}
        """Those whose numbers are those of packed tensors: slices hold these as they are."""
        self.round_to(dtype)

    def _matrices(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """What a precision rounds: all else is as files have it."""
        for name, parameter in self.model.named_parameters():
            module = self.model.get_submodule(name.rpartition(".")[0])
            is_matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and name.endswith(".weight")
            if (is_matrix and not is_of_router(name)) or (EXPERTS in name and parameter.dim() == 3):
                yield name, parameter

    @torch.inference_mode()
    def round_to(self, dtype: str) -> None:
        """Rounds all weights as slices of that precision hold them; they stay float32 numbers."""
        held = DTYPES[ACTIVATIONS[dtype]]
        for name, parameter in self._matrices():
            if dtype != FILED or name not in self._packed:
                parameter.copy_(parameter.to(held))
        if dtype in ROUNDINGS:
            self._round_matrices(ROUNDINGS[dtype], held)
        if dtype == FILED:
            self._round_anew()

    def _round_anew(self) -> None:
        """What a quantised checkpoint has in other numbers than layers compute with is rounded to those; of a
        layer's experts it may be some only, of which others are stacked in the same parameter."""
        forms = {name: self._tensors.form(name) for name in self._names}
        anew = {name for name, form in forms.items() if form and self._tensors.is_rounded_anew(name)}
        mixtures = {name.partition(EXPERTS)[0] for name in anew if EXPERTS in name}
        rounded = {}
        for name, ours in self._names.items():
            if forms[name] and (name in anew or name.partition(EXPERTS)[0] in mixtures):
                outputs, inputs = shape = self._tensors.shape(name)
                numbers = numbers_of(FORMS[forms[name]], tensor_of(self._tensors.panels(name, shape)))
                rounded[ours] = numbers[:outputs, :inputs]
        for name, values in joined(self.model, self._family, rounded).items():
            if name in self._packed:
                self._packed[name].copy_(values)

    def _round_matrices(self, rounding: Rounding, held: torch.dtype) -> None:
        """Linear layers of the decoder, experts and `lm_head`, as slices pack them; no towers."""
        values = self.head.weight.clone()  # a tied embedding keeps its own
        self.head.weight = torch.nn.Parameter(values, requires_grad=False)
        for path, module in [*self.model.get_decoder().named_modules(), ("lm_head", self.head)]:
            is_linear = type(module) is torch.nn.Linear and not is_of_router(path)
            for name, weight in module.named_parameters(recurse=False):
                is_expert = weight.dim() == 3 and not isinstance(module, torch.nn.Conv1d)
                if (is_linear and name == "weight") or is_expert:
                    if is_inputs_first(module):
                        weight = weight.transpose(1, 2)
                    numbers = array_of(weight.to(held).flatten(0, -2))
                    widened = rounding.widen(rounding.round(numbers), *numbers.shape)
                    weight.copy_(tensor_of(widened).view_as(weight))

    @contextlib.contextmanager
    def rounding_to(self, dtype: str, cache: str = CACHE_AUTO, device: str = "cpu") -> Iterator[None]:
        """While it lasts, numbers are rounded where slices round them: what layers, and attention and MLPs in
        them, give; rows before they are multiplied, but for those of queries, keys, values and logits that
        are packed; and keys and values as such a `cache` does. On GPUs rows and products have the dtype of
        hidden states.

        So it shows how far rounding alone moves this model's logits, without a kernel for such numbers. In a
        mixture the last bits may choose an expert, which is rare and moves logits far: there routers see
        less, so that it happens. Float32 is not rounded.
        """
        held, kept = DTYPES[ACTIVATIONS[dtype]], cached_as(cache, dtype)
        if held == torch.float32 == DTYPES.get(kept):
            yield
            return

        def given_back(module: torch.nn.Module, given: Any, made: Any) -> Any:
            if isinstance(made, tuple):
                return made[0].to(held).float(), *made[1:]
            return made.to(held).float()

        def multiplied(module: torch.nn.Module, given: tuple[Any, ...]) -> Any:
            rows = _as_levels(given[0]) if are_levels else given[0].to(held).float()
            return rows, *given[1:]

        def blurred(router: torch.nn.Module, given: tuple[Any, ...]) -> Any:
            fraction, exponent = torch.frexp(given[0])
            return torch.ldexp((fraction * 2**ROUTER_BITS).round() / 2**ROUTER_BITS, exponent), *given[1:]

        def cached(module: torch.nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            return _as_levels(made) if kept == Q8_0 else made.to(DTYPES[kept]).float()

        decoder, is_gpu = self.model.get_decoder(), device != "cpu"
        are_levels = is_packed(dtype) and not is_gpu
        parts = [decoder.get_input_embeddings(), *decoder.layers]
        parts += [part for layer in decoder.layers for part in layer.children()]
        parts = [part for part in parts if "Norm" not in type(part).__name__]
        hooks = [part.register_forward_hook(given_back) for part in parts]
        for name, module in [*decoder.named_modules(), ("lm_head", self.head)]:
            owner, _, kind = name.rpartition(".")
            are_values = kind == "k_proj" and getattr(decoder.get_submodule(owner), "v_proj", None) is None
            is_fine = are_levels and (kind in FINE or are_values)
            is_multiplied = isinstance(module, torch.nn.Linear) and not is_of_router(f"{name}.")
            if is_multiplied and is_gpu:
                hooks.append(module.register_forward_hook(given_back))
            if (
                (dtype != "float16" or is_gpu)
                and not is_fine
                and (is_multiplied or name.endswith(EXPERTS.rstrip(".")))
            ):
                hooks.append(module.register_forward_pre_hook(multiplied))
            if kind in KEYS_AND_VALUES:
                hooks.append(module.register_forward_hook(cached))
            if kind.startswith(INPUTS):
                hooks.append(module.register_forward_hook(given_back))
            if hasattr(module, "experts"):
                router = module.gate if hasattr(module, "gate") else module.router
                hooks.append(router.register_forward_pre_hook(blurred))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def forced_logits(self, prompt: tuple[int, ...], answer: list[int]) -> list[F32]:
        """Logits after the prompt and after each token of the answer, from one pass without a cache."""
        out = self.model(
            input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False, logits_to_keep=len(answer) + 1
        )
        return list(out.logits[0].numpy())


def is_of_router(name: str) -> bool:
    """Whether a parameter or a module, by its name, belongs to a router: these are never packed."""
    return ".router." in f".{name}."


def _as_levels(numbers: torch.Tensor) -> torch.Tensor:
    """Each 32 of a row's numbers as whole multiples of a 127th of the largest, that step in float16."""
    width = numbers.shape[-1]
    filled = F.pad(numbers, (0, -width % GROUP))
    groups = filled.view(*numbers.shape[:-1], -1, GROUP)
    steps = (groups.abs().amax(dim=-1, keepdim=True) / 127).half().float()
    rounded = torch.where(steps > 0, groups / steps, 0.0).round() * steps
    return rounded.view_as(filled)[..., :width]


def is_inputs_first(module: torch.nn.Module) -> bool:
    """Whether a module holds its experts as `[experts, in, out]`, the outputs of gate and up in turns."""
    return bool(getattr(module, "is_transposed", False))


def joined(model: Any, family: Family, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers has for weights, by plain names, in one tensor for all layers or for all experts of a
    layer, so joined; all others as they are."""
    found, layers = dict(weights), model.get_decoder().layers
    for tensor, (part, axis) in SHARED.items():
        names = [f"{PLAIN_ROOT.prefix}layers.{at}.{LAYER_INPUT}.{part}.weight" for at in range(len(layers))]
        if own := [found.pop(name) for name in names if name in found]:
            whole = own[0] if axis is None else torch.cat(own, axis)
            found[f"{PLAIN_ROOT.prefix}{tensor}.weight"] = whole
    for index, layer in enumerate(layers):
        prefix = f"{PLAIN_ROOT.prefix}layers.{index}."
        for name in family.stacked:
            for way in family.ways_to_stack(name):
                experts: list[torch.Tensor] = []
                while prefix + way[0].format(len(experts)) in found:
                    parts = [prefix + part.format(len(experts)) for part in way]
                    experts.append(torch.cat([found.pop(part) for part in parts]))
                if experts:
                    values, module = torch.stack(experts), layer.get_submodule(name.rpartition(".")[0])
                    if is_inputs_first(module):
                        in_turns = torch.unflatten(values, 1, (len(way), -1)).transpose(1, 2).flatten(1, 2)
                        values = in_turns.transpose(1, -1).contiguous()
                    found[prefix + name] = values
    return found


def plain_names(family: Family, tensors: Tensors) -> dict[str, str]:
    """What the decoder alone calls each tensor of a checkpoint, which may be multimodal, by its name."""
    root = family.root(tensors)
    start, heads = re.compile(f"^{re.escape(root.prefix)}"), {root.lm_head: PLAIN_ROOT.lm_head}
    return {name: heads.get(name) or start.sub(PLAIN_ROOT.prefix, name) for name in tensors}


def _load(files: ModelFiles) -> Any:
    """A model in float32, its weights unpacked: as transformers itself reads them; as we read them where it
    cannot: GGUF files in parts, of Llama with a window, of architectures that it does not know, and
    checkpoints of other tools, for which it needs these."""
    with importing():
        from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it advises faster libraries; the plain one is wanted
    path, config = files.gguf, files.config()
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # some versions take SDPA for Gemma 2, which has no cap
    if path is None and not files.is_packed:
        for name in sorted(set(files.file_map().values())):
            files.path(name)
        own = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return AutoModelForCausalLM.from_pretrained(files.path("config.json").parent, **own, **options)
    for name in QUANTISED:
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    if (
        path is not None
        and config.model_type.removesuffix("_text") in GGUF_SUPPORTED_ARCHITECTURES
        and len(parts_of(path.name)) == 1
        and config.model_type == MODEL_TYPES[files.gguf_architecture]
        and files.gguf_architecture not in MISREAD
    ):
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
            tell_gguf_version()
            weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    else:
        family, tensors = FAMILIES[config.model_type], files.tensors()
        names = plain_names(family, tensors)
        loaded = {ours: tensor_of(tensors.load(name, tensors.shape(name))) for name, ours in names.items()}
        weights = joined(empty, family, loaded)
        for name in [name for name in weights if name.endswith(STORED_FADING)]:
            weights[f"{name}_log"] = (-weights.pop(name)).double().log().float()
    # Not `gguf_file=`, which wants the accelerate package, does the same, and takes a config with less in it.
    return type(empty).from_pretrained(None, config=config, state_dict=weights, **options)
