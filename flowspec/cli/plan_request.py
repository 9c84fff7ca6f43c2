"""From the flags of `flowspec plan` to what the planner is asked: devices, links, model, drafter."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.cli.options import joined
from flowspec.cli.parser import Rare
from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.mtp_files import has_mtp
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.plan.memory import ModelWeights, weights_of
from flowspec.plan.profile import find_profile, profile_names
from flowspec.plan.shape import ModelShape, find_shape, longest_context, shape_of
from flowspec.plan.sites import Network, PlanRequest, Site, site
from flowspec.plan.speed import completed
from flowspec.runtime.cluster import Device, pick_context, stage_devices
from flowspec.runtime.cluster_file import (
    declared_profile,
    parse_links,
    read_cluster,
    read_drafters,
    read_links,
)
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import Taken, taken_for
from flowspec.runtime.planning.first_look import refuse_silent
from flowspec.runtime.planning.plan_inputs import drafter_inputs, model_weights, typical_context
from flowspec.runtime.planning.survey import ASSUMED, DECLARED, Survey, survey
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.session import pick_dtype

GIVEN = "given"
"""By `--link`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the planner is asked, with the names of the drafters; the `survey` where the devices of a cluster
    file were asked, and what drafters there were to choose from where none is named. Where the links are
    from: `given`, `declared`, `measured` or `assumed`, and what was `typed` of them. Whether the acceptance
    is the user's or published, and whether the model is the bundled toy."""

    request: PlanRequest
    drafters: tuple[str, ...]
    survey: Survey | None
    links: str = ASSUMED
    typed: tuple[str, ...] = ()
    taken: Taken | None = None
    is_acceptance_given: bool = False
    is_acceptance_published: bool = False
    is_toy: bool = False


def add_device_arguments(group: argparse._ActionsContainer) -> None:
    """What names the devices of a plan, and the links between them."""
    group.add_argument(
        "--devices",
        nargs="+",
        metavar="[Nx] BOARD,",
        help="devices that need not be there, by their boards (kinds of devices, by name or profile file): "
        "4x jetson-orin-nano, raspberry-pi-5",
    )
    group.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE.toml",
        help="the devices of this cluster file, which are asked how fast they are, as chat asks them",
    )
    group.add_argument(
        "--offline",
        action="store_true",
        help=Rare("with --cluster: ask no device, and take its board from its profile key"),
    )
    group.add_argument(
        "--link",
        action="append",
        metavar="[A:B=]MBIT/MS",
        help="of all links, or of one; may be repeated (default: the cluster file's, or as measured where "
        "its devices are asked, else 1000/0.5)",
    )


def read_plan_request(args: argparse.Namespace) -> Wanted:
    """What the flags ask for; raises `InputError`, and `ClusterError` where no device of a cluster file
    answers."""
    if _is_asked(args):
        every = read_cluster(args.cluster)
        refuse_silent(stage_devices(every), cluster_keys(args.cluster, every), needs_all=False)
    shape, weights, precisions, context = _model(args)
    wrong = [each for each in precisions if each not in PRECISION_BYTES]
    if wrong:
        raise InputError(f"--dtype: expected {', '.join(PRECISION_BYTES)}, got {wrong[0]!r:.80}")
    if args.acceptance is not None and not 0 < args.acceptance < 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    taken = None
    if args.shape is None:
        taken = taken_for(Decoding(drafters=joined(args.drafter)), args.model, args.cluster)
    return wanted_of(args, shape, weights, precisions, context, taken)


def wanted_of(
    args: argparse.Namespace,
    shape: ModelShape,
    weights: ModelWeights,
    precisions: tuple[str, ...],
    context: int,
    taken: Taken | None = None,
) -> Wanted:
    """What the flags ask for of a model that is known, with the drafter that is taken where they name none;
    raises as `read_plan_request`."""
    placed = {} if args.cluster is None else read_drafters(args.cluster)
    model = args.model if args.shape is None else args.shape
    decoding = Decoding(drafters=joined(args.drafter)) if taken is None else taken.decoding
    drafters = decoding.drafters_for(model, tuple(placed))
    drafter = drafter_inputs(drafters, placed, shape, may_fetch=decoding.may_fetch)
    planned = drafter.planned
    if planned is not None and args.acceptance is not None:
        planned = replace(planned, acceptance=args.acceptance)
    found = None
    if _is_asked(args):
        found = _survey(args, precisions, head_drafts=drafter.head_drafts)
        sites = [_complete(each, precisions) for each in found.sites]
    else:
        sites = _sites(args.devices, args.cluster)
    head = _head(args.head, sites)
    if head is not None and all(each.name != head.name for each in sites):
        sites = [*sites, head]
    if len(sites) > limits.STAGES_MAX:
        raise InputError(f"--devices: expected at most {limits.STAGES_MAX} devices, got {len(sites)}")
    for each in sites:
        for precision in precisions:
            each.profile.rates(precision)  # raises for one that it says nothing about
    chosen = found.head if head is None and found is not None else None if head is None else head.name
    network, links = _network(args, [each.name for each in sites], found)
    request = PlanRequest(
        sites=tuple(sites),
        network=network,
        shape=shape,
        weights=weights,
        precisions=precisions,
        drafter=planned,
        context=context,
        typical_context=typical_context(context),
        users=args.users,
        head=chosen,
        all_devices=args.all_devices,
        cache=args.cache,
    )
    return Wanted(
        request=request,
        drafters=drafters,
        survey=found,
        links=links,
        typed=tuple(args.link or ()),
        taken=taken,
        is_acceptance_published=drafter.is_published,
        is_acceptance_given=args.acceptance is not None,
        is_toy=args.shape is None and args.model == BUNDLED,
    )


def _is_asked(args: argparse.Namespace) -> bool:
    """Whether daemons are asked what they are."""
    return args.cluster is not None and args.devices is None and not args.offline


def _survey(args: argparse.Namespace, precisions: Sequence[str], *, head_drafts: bool) -> Survey:
    """The cluster's devices, asked as `chat` asks them."""
    every = read_cluster(args.cluster)
    keys = cluster_keys(args.cluster, every)
    return survey(
        stage_devices(every), args.cluster, precisions[0], keys, head_drafts=head_drafts, needs_all=False
    )


def _complete(place: Site, precisions: Sequence[str]) -> Site:
    profile = place.profile
    for precision in precisions:
        profile = completed(profile, precision)
    return replace(place, profile=profile)


def _model(args: argparse.Namespace) -> tuple[ModelShape, ModelWeights, tuple[str, ...], int]:
    """Shape, weights, precisions and context; of a folder the weights are counted in its files."""
    asked = None if args.dtype is None else tuple(dict.fromkeys(args.dtype.split(",")))
    if args.shape is not None:
        shape = find_shape(args.shape)
        context = pick_context(args.context, longest_context(shape))
        return shape, weights_of(shape), asked or ("float16",), context
    files = ModelFiles(args.model)
    spec, config = files.spec, files.config()
    shape = shape_of(spec, args.model, files.filed_bytes, has_mtp=has_mtp(files, config))
    return (
        shape,
        model_weights(files, shape),
        asked or (pick_dtype(None, files, config),),
        pick_context(args.context, spec.context_max),
    )


def _sites(boards: Sequence[str] | None, cluster: Path | None) -> list[Site]:
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
            profile = find_profile(name, what="--devices")
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
            "file, or --devices with a board for each; with --offline no daemon is asked how fast it is"
        )
    return site(device.name, profile, device.memory_bytes)


def _boards(words: Sequence[str]) -> list[str]:
    """`2x raspberry-pi-5, jetson-orin-nano`, in as many words as it was typed, as names."""
    found: list[str] = []
    for part in " ".join(words).split(","):
        match = re.fullmatch(r"(?:(\d+) ?x)?\s*(\S.*?)\s*", part.strip())
        count = "1" if match is None else match[1] or "1"
        if match is None or not re.fullmatch(r"[1-9]\d{0,2}", count) or re.fullmatch(r"\d+ ?x", match[2]):
            raise InputError(
                "--devices: expected boards with commas, one or more of each, such as 2x raspberry-pi-5, got "
                f"{part!r:.80}"
            )
        apart = re.fullmatch(r"(\S+)\s+(\d+ ?x.*)", match[2])
        if apart is not None:
            raise InputError(
                f"--devices: expected a comma between boards, such as {apart[1]:.80}, {apart[2]:.80}, got "
                f"{match[2]!r:.80}"
            )
        counted = re.fullmatch(r"([1-9]\d{0,2})\s+(\S+)", match[2])
        if counted is not None and not match[1]:
            raise InputError(
                f"--devices: expected {counted[1]}x {counted[2]:.80} for so many boards, got {match[2]!r:.80}"
            )
        board = match[2].split()[-1]
        if board != match[2] and board in profile_names():
            raise InputError(
                f"--devices: expected one or more of a board, such as 2x {board}, got {match[2]!r:.80}"
            )
        found += [match[2]] * int(count)
    return found


def _head(name: str | None, sites: Sequence[Site]) -> Site | None:
    """A device by its name, or a board that is there for the head; it may run a stage, too."""
    if name is None:
        return None
    known = [each for each in sites if each.name == name]
    if known:
        return known[0]
    profile = find_profile(name, what="--head")
    return site(
        f"{profile.name}-head" if any(each.name == profile.name for each in sites) else profile.name, profile
    )


def _network(args: argparse.Namespace, names: Sequence[str], found: Survey | None) -> tuple[Network, str]:
    """As `--link` says, else as the cluster file, else as measured; and which of these (`Wanted.links`)."""
    if args.link:
        return parse_links(args.link, names, "--link"), GIVEN
    if found is not None:
        return found.network, found.links
    declared = None if args.cluster is None else read_links(args.cluster, names)
    if declared is not None:
        return declared, DECLARED
    return parse_links([], names, "--link"), ASSUMED
