"""From the flags of `flowspec plan` to what the planner is asked: devices, links, model, drafter."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flowspec.core import limits
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.support import context_max, family_of
from flowspec.plan.memory import ModelWeights, weights_of
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import PRECISION_BYTES, ModelShape, eagle_shape, find_shape, shape_of
from flowspec.plan.sites import Drafter, Network, Site, Wish, site
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.cluster import Device, pick_context, read_cluster
from flowspec.runtime.session import pick_dtype

EAGLE, NGRAM, NONE = "eagle", "ngram", "none"
ACCEPTANCE = {EAGLE: 0.635, NGRAM: 0.25}
"""Of drafters that nothing is known of: an EAGLE head's best guess on the published testbed; n-grams, a guess."""
ACCEPTANCE_MODEL = 0.58
"""A small language model's best guess, as the bundled one's."""
TYPICAL_CONTEXT_MAX = 512
ADDRESS_MAX = 64


def find_wish(args: argparse.Namespace) -> Wish:
    """What the flags ask for; raises `InputError`."""
    shape, weights, precisions, context = _model(args)
    sites = _sites(args.devices, args.cluster)
    head = _head(args.head, sites)
    if head is not None and all(each.name != head.name for each in sites):
        sites = [*sites, head]
    if len(sites) > limits.STAGES_MAX:
        raise InputError(f"--devices: expected at most {limits.STAGES_MAX} devices, got {len(sites)}")
    wrong = [each for each in precisions if each not in PRECISION_BYTES]
    if wrong:
        raise InputError(f"--precision: expected {', '.join(PRECISION_BYTES)}, got {wrong[0]!r:.80}")
    for each in sites:
        for precision in precisions:
            each.profile.flops(precision)  # raises for one that it says nothing about
    return Wish(
        sites=tuple(sites),
        network=_network(args.link or ["1000/0.5"], [each.name for each in sites]),
        shape=shape,
        weights=weights,
        precisions=precisions,
        drafter=_drafter(args, shape),
        context=context,
        typical_context=min(TYPICAL_CONTEXT_MAX, context // 2),
        users=args.users,
        head=None if head is None else head.name,
    )


def _model(args: argparse.Namespace) -> tuple[ModelShape, ModelWeights, tuple[str, ...], int]:
    """Shape, weights, precisions and context; of a folder the weights are counted in its files."""
    asked = None if args.precision is None else tuple(dict.fromkeys(args.precision.split(",")))
    if args.shape is not None:
        shape = find_shape(args.shape)
        return shape, weights_of(shape), asked or ("float16",), pick_context(args.context, limits.CONTEXT_MAX)
    files = ModelFiles(args.model)
    config = files.config()
    family_of(config, files.model)
    shape = shape_of(config, args.model)
    weights = weights_of(shape) if files.folder is None else counted_weights(files, shape)
    return shape, weights, asked or (pick_dtype(None, config),), pick_context(args.context, context_max(config))


def counted_weights(files: ModelFiles, shape: ModelShape) -> ModelWeights:
    """Weights of a model's parts by the headers of its files; nothing is loaded."""
    tensors = files.tensors()
    layers: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for name in files.weight_map():
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if found:
            layers[int(found[1])] += tensors.element_count(name)
        else:
            others[name.removesuffix(".weight").rpartition(".")[2]] += tensors.element_count(name)
    known = weights_of(shape)
    embedding = others["embed_tokens"] or known.embedding
    return ModelWeights(
        layer=max(layers.values(), default=known.layer),
        embedding=embedding,
        head=embedding if shape.is_tied else others["lm_head"] or embedding,
        norm=others["norm"] or known.norm,
        is_tied=shape.is_tied,
    )


def _sites(boards: str | None, cluster: Path | None) -> list[Site]:
    """The devices of `--devices`, or of the cluster file with their boards from there or, in order, from `--devices`."""
    names = [] if boards is None else _boards(boards)
    if cluster is None:
        if not names:
            raise InputError("expected --devices or --cluster: which devices are there?")
        seen: Counter[str] = Counter()
        total = Counter(names)
        sites = []
        for name in names:
            seen[name] += 1
            profile = find_profile(name)
            sites.append(site(profile.name if total[name] == 1 else f"{profile.name}-{seen[name]}", profile))
        twice = [name for name, count in Counter(each.name for each in sites).items() if count > 1]
        if twice:
            raise InputError(f"--devices: expected different names, got two files named {twice[0]!r}")
        return sites
    devices = read_cluster(cluster)
    if names and len(names) != len(devices):
        raise InputError(f"--devices: expected a board for each of the {len(devices)} devices of {cluster}, got {len(names)}")
    return [_of_cluster(device, names[number] if names else device.profile, cluster) for number, device in enumerate(devices)]


def _of_cluster(device: Device, board: str | None, cluster: Path) -> Site:
    if board is None:
        raise InputError(f'{cluster}: {device.name}: expected profile = "a board or a profile file", or --devices with a board for each')
    if board.endswith(".toml") and not Path(board).is_absolute() and (cluster.parent / board).is_file():
        board = str(cluster.parent / board)
    return site(device.name, find_profile(board), device.memory_bytes)


def _boards(text: str) -> list[str]:
    """`jetson-orin-nano,raspberry-pi-5x2` as names."""
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(.+)x([1-9]\d{0,2})", part.strip())
        found += [match[1]] * int(match[2]) if match else [part.strip()]
    return found


def _head(name: str | None, sites: Sequence[Site]) -> Site | None:
    """A device by its name, or a board that is there for the head; it may run a stage, too."""
    if name is None:
        return None
    known = [each for each in sites if each.name == name]
    if known:
        return known[0]
    profile: DeviceProfile = find_profile(name)
    return site(f"{profile.name}-head" if any(each.name == profile.name for each in sites) else profile.name, profile)


def _network(texts: Sequence[str], names: Sequence[str]) -> Network:
    """`1000/0.5` for all links, `A:B=100/2` for one: Mbit/s and milliseconds."""
    default, pairs = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005), dict[frozenset[str], LinkSpec]()
    for text in texts:
        pair, has_pair, speed = text.rpartition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?", speed)
        if match is None or float(match[1]) <= 0:
            raise InputError(f"--link: expected Mbit/s and ms such as 1000/0.5, or for one link A:B=100/2, got {text!r:.80}")
        link = LinkSpec(bandwidth_mbps=float(match[1]), delay_s=float(match[2] or 0.5) / 1000)
        if not has_pair:
            default = link
            continue
        ends = pair.split(":")
        wrong = [end for end in ends if end not in names]
        if len(ends) != 2 or wrong or ends[0] == ends[1]:
            raise InputError(f"--link: expected two of {', '.join(names)} as A:B, got {pair!r:.80}")
        pairs[frozenset(ends)] = link
    return Network(default=default, pairs=pairs)


def _drafter(args: argparse.Namespace, shape: ModelShape) -> Drafter | None:
    """The drafter of the flags; without one the bundled model has its own and all others an EAGLE head."""
    name = args.drafter or (BUNDLED if args.shape is None and args.model == BUNDLED else EAGLE)
    if args.acceptance is not None and not 0 < args.acceptance < 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    if name == NONE:
        return None
    if name in (EAGLE, NGRAM):
        return Drafter(shape=eagle_shape(shape) if name == EAGLE else None, acceptance=args.acceptance or ACCEPTANCE[name])
    if name == BUNDLED:
        drafter = shape_of(ModelFiles(str(bundled_folder("draft"))).config(), name)
    elif Path(name).is_dir() or "/" in name:
        drafter = shape_of(ModelFiles(name).config(), name)
    else:
        drafter = find_shape(name)
    if drafter.vocabulary != shape.vocabulary:
        raise InputError(f"--drafter: expected the model's vocabulary of {shape.vocabulary}, but {name} has {drafter.vocabulary}")
    return Drafter(shape=drafter, acceptance=args.acceptance or (ACCEPTANCE[EAGLE] if name.startswith(f"{EAGLE}-") else ACCEPTANCE_MODEL))
