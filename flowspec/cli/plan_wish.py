"""From the flags of `flowspec plan` to what the planner is asked: devices, links, model, drafter."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.kinds import SUPPOSED, WORDS, find_drafter, sketched
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.support import context_max, family_of
from flowspec.plan.memory import ModelWeights, weights_of
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import ModelShape, find_shape, shape_of
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, Site, site
from flowspec.runtime.cluster import Device, pick_context, stage_devices
from flowspec.runtime.cluster_file import declared_profile, parse_links, read_cluster, read_links
from flowspec.runtime.planning.wish import model_weights, typical_context
from flowspec.runtime.session import pick_dtype


def find_wish(args: argparse.Namespace) -> PlanRequest:
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
    return PlanRequest(
        sites=tuple(sites),
        network=_network(args, [each.name for each in sites]),
        shape=shape,
        weights=weights,
        precisions=precisions,
        drafter=_drafter(args, shape),
        context=context,
        typical_context=typical_context(context),
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
    return (
        shape,
        model_weights(files, shape),
        asked or (pick_dtype(None, config),),
        pick_context(args.context, context_max(config)),
    )


def _sites(boards: str | None, cluster: Path | None) -> list[Site]:
    """The devices of `--devices`, or of the cluster file with their boards from there or, in order, from
    `--devices`."""
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
    devices = stage_devices(read_cluster(cluster))
    if names and len(names) != len(devices):
        raise InputError(
            f"--devices: expected a board for each of the {len(devices)} devices of {cluster}, got "
            f"{len(names)}"
        )
    return [
        _of_cluster(device, names[number] if names else device.profile, cluster)
        for number, device in enumerate(devices)
    ]


def _of_cluster(device: Device, board: str | None, cluster: Path) -> Site:
    profile = declared_profile(replace(device, profile=board), cluster)
    if profile is None:
        raise InputError(
            f'{cluster}: {device.name}: expected profile = "raspberry-pi-5", another board or a profile '
            "file, or --devices with a board for each; plan asks no daemon how fast it is"
        )
    return site(device.name, profile, device.memory_bytes)


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
    profile = find_profile(name)
    return site(
        f"{profile.name}-head" if any(each.name == profile.name for each in sites) else profile.name, profile
    )


def _network(args: argparse.Namespace, names: Sequence[str]) -> Network:
    """As `--link` says, else the cluster file."""
    declared = None if args.cluster is None or args.link else read_links(args.cluster, names)
    return declared or parse_links(args.link or [], names, "--link")


def _drafter(args: argparse.Namespace, shape: ModelShape) -> PlannedDrafter | None:
    """The drafter of the flags; without one the bundled model has its own and all others an EAGLE head."""
    name = args.drafter or (BUNDLED if args.shape is None and args.model == BUNDLED else SUPPOSED)
    if args.acceptance is not None and not 0 < args.acceptance < 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    has_files = name in (*WORDS, BUNDLED) or Path(name).is_dir() or "/" in name
    if name == SUPPOSED or not has_files:
        found: PlannedDrafter | None = sketched(name, shape)
    else:
        found = find_drafter(name).reckoned(shape)
    return found if found is None or args.acceptance is None else replace(found, acceptance=args.acceptance)
