"""From the flags of `flowspec plan` to what the planner is asked: devices, links, model, drafter."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from flowspec.cli.options import joined
from flowspec.cli.parser import Rare
from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.layouts import has_mtp
from flowspec.draft.registry import FALLBACK, PLANNED_FALLBACK
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.plan.memory import ModelWeights, weights_of
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.profile import find_profile, profile_names
from flowspec.plan.shape import ModelShape, find_shape, longest_context, shape_of
from flowspec.plan.sites import Network, PlanRequest, Site, site
from flowspec.plan.speed import completed
from flowspec.runtime.cluster import pick_context, stage_devices
from flowspec.runtime.cluster_file import (
    LINK_DEFAULT,
    declared_profile,
    parse_links,
    read_cluster,
    read_drafters,
    read_links,
)
from flowspec.runtime.decoding import Decoding, choose_drafter
from flowspec.runtime.plan_inputs import drafter_inputs, model_weights, typical_context
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.session import pick_dtype
from flowspec.runtime.survey import ASSUMED, DECLARED, Survey, Surveyor, refuse_silent

GIVEN = "given"
"""By `--link`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the planner is asked, with the names of the drafters and what is said of them; the `survey` where
    the devices of a cluster file were asked. The links are `given`, `declared`, `measured` or `assumed`."""

    request: PlanRequest
    drafters: tuple[str, ...]
    survey: Survey | None
    links: str
    is_acceptance_published: bool
    drafter_note: str = ""


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


def read_plan_inputs(args: argparse.Namespace) -> PlanInputs:
    """What the flags ask for, but no drafter that nobody named where the model does not fit beside it, as
    chat then does without; raises `InputError`, and `ClusterError` where no device of a cluster file
    answers."""
    if _is_asked(args):
        every = read_cluster(args.cluster)
        refuse_silent(stage_devices(every), cluster_keys(args.cluster, every), needs_all=False)
    precisions = () if args.dtype is None else tuple(dict.fromkeys(args.dtype.split(",")))
    if args.shape is not None:
        shape = find_shape(args.shape)
        weights, context_max = weights_of(shape), longest_context(shape)
        precisions = precisions or ("float16",)
    else:
        files = ModelFiles(args.model)
        spec, config = files.spec, files.config()
        shape = shape_of(spec, args.model, files.filed_bytes, has_mtp=has_mtp(files, config))
        weights, context_max = model_weights(files, shape), spec.context_max
        precisions = precisions or (pick_dtype(None, files, config),)
    context = pick_context(args.context, context_max)
    wrong = [each for each in precisions if each not in PRECISION_BYTES]
    if wrong:
        raise InputError(f"--dtype: expected {', '.join(PRECISION_BYTES)}, got {wrong[0]!r:.80}")
    if args.acceptance is not None and not 0 < args.acceptance < 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    decoding = Decoding(drafters=joined(args.drafter))
    if args.shape is None:
        decoding = choose_drafter(decoding, args.model, args.cluster)
    inputs = make_plan_inputs(args, shape, weights, precisions, context, decoding)
    if not decoding.is_default:
        return replace(inputs, drafter_note="" if args.drafter else ", the default")
    try:
        make_plan(inputs.request)
    except DoesNotFit:
        return replace(
            inputs,
            request=replace(inputs.request, drafter=PLANNED_FALLBACK),
            drafters=(FALLBACK,),
            is_acceptance_published=False,
            drafter_note=f": beside {inputs.drafters[0]}, which is here, the model does not fit",
        )
    return replace(inputs, drafter_note=f", the best one that is here (--drafter {FALLBACK} does without)")


def make_plan_inputs(
    args: argparse.Namespace,
    shape: ModelShape,
    weights: ModelWeights,
    precisions: tuple[str, ...],
    context: int,
    decoding: Decoding,
) -> PlanInputs:
    """What the flags ask for of a model and a drafter that are known; raises as `read_plan_inputs`."""
    placed = {} if args.cluster is None else read_drafters(args.cluster)
    drafters = decoding.drafters_for(args.shape or args.model, tuple(placed))
    drafter = drafter_inputs(drafters, placed, shape, may_fetch=decoding.may_fetch)
    planned = drafter.planned
    if planned is not None and args.acceptance is not None:
        planned = replace(planned, acceptance=args.acceptance)
    found, head = None, None
    if _is_asked(args):
        every = read_cluster(args.cluster)
        found = Surveyor(
            devices=tuple(stage_devices(every)),
            cluster=args.cluster,
            precision=precisions[0],
            keys=cluster_keys(args.cluster, every),
        ).survey(head_drafts=drafter.head_drafts, needs_all=False)
        head = found.head
        sites = [replace(each, profile=reduce(completed, precisions, each.profile)) for each in found.sites]
    else:
        sites = _sites(args)
    if args.head is not None:
        own = _head(args.head, sites)
        head = own.name
        if all(each.name != head for each in sites):
            sites.append(own)
    if len(sites) > limits.STAGES_MAX:
        raise InputError(f"--devices: expected at most {limits.STAGES_MAX} devices, got {len(sites)}")
    for each in sites:
        for precision in precisions:
            each.profile.rates(precision)  # raises for one that it says nothing about
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
        head=head,
        all_devices=args.all_devices,
        cache=args.cache,
    )
    return PlanInputs(
        request=request,
        drafters=drafters,
        survey=found,
        links=links,
        is_acceptance_published=drafter.is_published,
    )


def _is_asked(args: argparse.Namespace) -> bool:
    """Whether daemons are asked what they are."""
    return args.cluster is not None and args.devices is None and not args.offline


def _sites(args: argparse.Namespace) -> list[Site]:
    """The devices of `--devices`, or of the cluster file with their boards from there or, in order, from
    `--devices`."""
    boards = [] if args.devices is None else _boards(args.devices)
    sites = []
    if args.cluster is None:
        if not boards:
            raise InputError("expected --devices or --cluster: which devices are there?")
        for number, name in enumerate(boards, 1):
            profile = find_profile(name, what="--devices")
            ending = f"-{boards[:number].count(name)}" if boards.count(name) > 1 else ""
            sites.append(site(f"{profile.name}{ending}", profile))
        names = [each.name for each in sites]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"--devices: expected different names, got two files named {twice[0]!r}")
        return sites
    devices = stage_devices(read_cluster(args.cluster))
    if boards and len(boards) != len(devices):
        raise InputError(
            f"--devices: expected a board for each of the {len(devices)} devices of {args.cluster}, got "
            f"{len(boards)}"
        )
    for number, device in enumerate(devices):
        board = boards[number] if boards else device.profile
        declared = declared_profile(replace(device, profile=board), args.cluster)
        if declared is None:
            raise InputError(
                f'{args.cluster}: {device.name}: expected profile = "raspberry-pi-5", another board or a '
                "profile file, or --devices with a board for each; with --offline no daemon is asked how "
                "fast it is"
            )
        sites.append(site(device.name, declared, device.memory_bytes))
    return sites


def _boards(words: Sequence[str]) -> list[str]:
    """`2x raspberry-pi-5, jetson-orin-nano`, in as many words as it was typed, as names."""
    found: list[str] = []
    for part in " ".join(words).split(","):
        match = re.fullmatch(r"(?:(\d+) ?x)?\s*(\S.*?)\s*", part.strip())
        count, board = ("0", "") if match is None else (match[1] or "", match[2])
        got = board
        if not re.fullmatch(r"([1-9]\d{0,2})?", count) or re.fullmatch(r"\d+ ?x", board):
            expected, got = "boards with commas, one or more of each, such as 2x raspberry-pi-5", part
        elif apart := re.fullmatch(r"(\S+)\s+(\d+ ?x.*)", board):
            expected = f"a comma between boards, such as {apart[1]:.80}, {apart[2]:.80}"
        elif not count and (many := re.fullmatch(r"([1-9]\d{0,2})\s+(\S+)", board)):
            expected = f"{many[1]}x {many[2]:.80} for so many boards"
        elif (last := board.split()[-1]) != board and last in profile_names():
            expected = f"one or more of a board, such as 2x {last}"
        else:
            found += [board] * int(count or 1)
            continue
        raise InputError(f"--devices: expected {expected}, got {got!r:.80}")
    return found


def _head(name: str, sites: Sequence[Site]) -> Site:
    """A device by its name, or a board that is there for the head; it may run a stage, too."""
    names = [each.name for each in sites]
    if name in names:
        return sites[names.index(name)]
    profile = find_profile(name, what="--head")
    return site(f"{profile.name}-head" if profile.name in names else profile.name, profile)


def _network(args: argparse.Namespace, names: Sequence[str], found: Survey | None) -> tuple[Network, str]:
    """As `--link` says, else as the cluster file, else as measured; and which of these (`links`)."""
    if args.link:
        return parse_links(args.link, names, "--link"), GIVEN
    if found is not None:
        return found.network, found.links
    declared = None if args.cluster is None else read_links(args.cluster, names)
    if declared is not None:
        return declared, DECLARED
    return Network(default=LINK_DEFAULT), ASSUMED
