"""Flags that several commands share, and what they mean together with a model's recommendations."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from flowspec.cli.parser import Rare
from flowspec.core.methods import METHODS, options_of
from flowspec.core.protocol.limits import TREE_NODES_MAX
from flowspec.core.protocol.messages import SAMPLING_FIELDS
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.draft.registry import FALLBACK, WORDS
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, bundled_models
from flowspec.runtime.decoding import AUTO, Decoding, choose_decoding, method_for
from flowspec.runtime.sampling_params import SEEDS, SamplingParams, usable_seed
from flowspec.runtime.session import ClusterOptions

FILTERS = tuple(name for name in SAMPLING_FIELDS if name not in ("temperature", "seed"))
LOCAL = 4
"""Processes of this machine, where nobody says where a model is to run."""
UNTIL_ITS_END = "until the model ends it, or the context is full"
"""The length of an answer where nobody says it."""
DEFAULTS = {
    "temperature": " (default: the model's recommendation, else 0)",
    "seed": " (default: drawn and printed)",
}
Number = TypeVar("Number", int, float)


# ------------------------------------------------------------------------------------------- types of flags


def numbers(kind: Callable[[str], Number], example: str, text: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        expected = f"numbers with commas, such as {example}"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


number_list, reals = partial(numbers, int, "3,1,2,2"), partial(numbers, float, "0,0.7,1")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """`8,16,32`."""
    return tuple(positive(part) for part in text.split(","))


def drafter_names(text: str) -> tuple[str, ...]:
    """`draft,draft-math` as names; a folder may have commas in its name."""
    names = (text,) if os.path.isdir(text) else tuple(text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas, got {text!r}")
    return names


def sampling_number(name: str, text: str) -> int | float:
    """The value of a field of `Sampling`."""
    kind = SAMPLING_FIELDS[name]
    try:
        value: int | float = kind(text)
        if name == "seed":
            usable_seed(int(value))
        return value
    except ValueError:
        bounds = f" from {SEEDS[0]} to {SEEDS[-1]}" if name == "seed" else ""
        expected = f"a {'whole ' if kind is int else ''}number{bounds}"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.80}") from None


def check_new_toml(flag: str, path: Path, *, force: bool) -> None:
    """Raises `InputError` where a flag names no file that may be written."""
    if path.suffix != ".toml":
        raise InputError(f"{flag}: expected a file that ends with .toml, got {path}")
    if path.exists() and not force:
        raise InputError(f"{path} exists; give --force to overwrite it, or another file with {flag}")


def write_file(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        expected = "a file that can be written"
        raise InputError(f"{flag}: expected {expected}, got {path} ({error.strerror})") from None


# -------------------------------------------------------------------------------------- model and cluster


def add_model_argument(group: argparse._ActionsContainer) -> None:
    text = "model folder, GGUF file or hub id (default: the bundled model)"
    group.add_argument("--model", "-m", default=BUNDLED, metavar="PATH-OR-HUB-ID", help=text)


def add_cache_argument(group: argparse._ActionsContainer) -> None:
    text = (
        "keys and values: q8_0 takes half the memory of the usual 16 bits (default: float16, with --dtype "
        "float32 that)"
    )
    group.add_argument("--cache", choices=CACHES, default=CACHE_AUTO, help=text)


def add_model_arguments(parser: argparse.ArgumentParser, *, local_list: bool = False) -> None:
    group = parser.add_argument_group("model and cluster")
    add_model_argument(group)
    text = "precision; int8 and int4 pack the weights, gguf keeps those of a GGUF file"
    group.add_argument("--dtype", choices=ACTIVATIONS, help=f"{text} (default: the checkpoint's)")
    add_cache_argument(group)
    where = group.add_mutually_exclusive_group()
    text = "run on the devices of this cluster file"
    where.add_argument("--cluster", type=Path, metavar="FILE.toml", help=text)
    if local_list:
        text = f"run on N local processes, for each N (default: {LOCAL})"
        where.add_argument("--local", type=number_list, default=(LOCAL,), metavar="N[,N...]", help=text)
    else:
        text = f"run on N local processes (default: {LOCAL})"
        where.add_argument("--local", type=positive, metavar="N", help=text)
    text = "layers for each device, in order (default: chosen)"
    group.add_argument("--layers", type=number_list, metavar="3,1,2,2", help=text)
    text = "leave out no device of the cluster file, also where answers are faster without it"
    group.add_argument("--all-devices", action="store_true", help=text)
    text = "prompt and answer together; memory is reserved for it (default: 4096 or the model's limit)"
    group.add_argument("--context", type=positive, metavar="TOKENS", help=text)


def cluster_options(args: argparse.Namespace, local: int) -> ClusterOptions:
    return ClusterOptions(
        model=args.model or BUNDLED,
        dtype=args.dtype,
        cache=args.cache,
        cluster=args.cluster,
        local=local,
        layers=args.layers,
        all_devices=args.all_devices,
        context=args.context,
        log_level="INFO" if args.verbose else "WARNING",
        log_file=args.log_file,
    )


# ----------------------------------------------------------------------------------------------- decoding


def add_decoding_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """`--method` and what goes with it; with `several`, methods and chains may be repeated, and drafters that
    are repeated are alternatives."""
    group = parser.add_argument_group("decoding (changes the speed, never the answer)")
    action, repeated = ("append", "; may be repeated") if several else ("store", "")
    methods = (*METHODS, "all") if several else METHODS
    default = f"default: {method_for((), None)}; {method_for((), AUTO)} with --chain"
    text = f"decoding method: {', '.join(METHODS)}{', or all' * several}{repeated} ({default})"
    group.add_argument("--method", action=action, choices=methods, metavar="NAME", help=text)
    together = "several with commas" if several else "may be repeated, for several that draft together"
    text = (
        f"what guesses ahead: bundled, {', '.join(bundled_models())}, a folder or hub id of a small model, "
        f"EAGLE head, block drafter or Gemma 4 assistant, {', '.join(WORDS[:-1])}, or {WORDS[-1]}; {together}"
        f"{repeated} (default: those of the cluster file, else bundled for the bundled model or the best "
        f"published one that is here, with {FALLBACK} beside it)"
    )
    names = "NAME[,NAME...]"
    group.add_argument("--drafter", action="append", type=drafter_names, metavar=names, help=text)
    text = "verify in steps, through these models, lowest first, before the target; auto: chosen as it goes"
    group.add_argument("--chain", action=action, metavar="auto|NAME,NAME...", help=Rare(text + repeated))
    text = "read prompts anew where they begin as another conversation does, not as they go on"
    group.add_argument("--no-enable-prefix-caching", action="store_true", help=Rare(text))
    parser.set_defaults(no_keep_learnt=several)
    if not several:
        text = (
            "neither begin with what earlier runs with the same models and devices learnt of the drafters, "
            "nor keep what is learnt"
        )
        group.add_argument("--no-keep-learnt", action="store_true", help=Rare(text))
    text = Rare("largest tree or segment (default: the method's)")
    group.add_argument("--tree-nodes", type=positive, metavar="N", help=text)
    deep = ", ".join(name for name in METHODS if "depth" in options_of(name))
    text = Rare(f"depth of the trees of {deep}")
    group.add_argument("--tree-depth", type=positive, metavar="N", help=text)


def joined(sets: Sequence[tuple[str, ...]] | None) -> tuple[str, ...]:
    """All drafters of a flag that was repeated."""
    return tuple(name for names in sets or () for name in names)


def decoding_options(
    args: argparse.Namespace, method: str | None, drafters: tuple[str, ...], chain: str | None = None
) -> Decoding:
    if args.tree_nodes is not None and args.tree_nodes > TREE_NODES_MAX:
        raise InputError(f"--tree-nodes: expected at most {TREE_NODES_MAX}, got {args.tree_nodes}")
    return choose_decoding(
        args.cluster,
        method,
        drafters,
        chain,
        nodes=args.tree_nodes,
        depth=args.tree_depth,
        prefix_caching=not args.no_enable_prefix_caching,
        keep_learnt=not args.no_keep_learnt,
    )


# ----------------------------------------------------------------------------------------------- sampling


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name in SAMPLING_FIELDS:
        add_sampling_argument(group, name, DEFAULTS.get(name, ""))
    text = f"longest answer (default: {UNTIL_ITS_END})"
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help=text)
    text = "end the answer before this text; may be repeated"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = Rare("end the answer at these tokens, too")
    group.add_argument("--stop-token-ids", type=number_list, default=(), metavar="2,7", help=text)
    text = Rare("do not end at the model's own stop tokens")
    group.add_argument("--ignore-eos", action="store_true", help=text)


def add_sampling_argument(
    group: argparse._ArgumentGroup, name: str, ending: str = "", *, default: float | None = None
) -> None:
    """The flag of a field of `Sampling`, with the `ending` of its help."""
    (words,) = (field.metadata for field in fields(SamplingParams) if field.name == name)
    text = words["help"] + ending
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=partial(sampling_number, name),
        default=default,
        metavar=words["metavar"],
        help=Rare(text) if name in FILTERS else text,
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags say, without the model's recommendations; raises `InputError` for what cannot be."""
    if any(not stop for stop in args.stop):
        raise InputError("--stop: expected a text, got an empty one")
    try:
        return SamplingParams(
            **{name: getattr(args, name) for name in SAMPLING_FIELDS},
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            stop_token_ids=args.stop_token_ids,
            ignore_eos=args.ignore_eos,
        )
    except InputError as error:
        raise InputError(by_flag(str(error).removeprefix("sampling: "))) from None


def by_flag(text: str, ending: str = "") -> str:
    """What is wrong with a field of `Sampling`, `top_p: expected ...`, by the flag that gave it."""
    name, colon, rest = text.partition(": ")
    if name not in (*SAMPLING_FIELDS, "stop_token_ids"):
        return text
    ending = "" if name in FILTERS else ending
    return f"--{name.replace('_', '-')}{ending}{colon}{rest}"
