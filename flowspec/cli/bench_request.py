"""The experiment that a command line of `flowspec bench` asks for: what its file says, with what the flags
say instead. What cannot be run is refused before anything is started or written."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from flowspec.bench.config import ACCEPTANCE_MAX, CLUSTER, SIMULATED, SYNTHETIC, USERS_MAX, Bench, Testbed
from flowspec.bench.drafting import RANDOM
from flowspec.bench.experiments import check_names, find_experiment, pick_setups, read_experiment
from flowspec.bench.plain import make_samplings
from flowspec.bench.profiles import find_profile
from flowspec.core.protocol.limits import DRAFTERS_MAX
from flowspec.draft.kinds import NONE, check_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED

JOBS_MAX = 64
DEFAULT = "paper-bundled"


def pick_experiment(args: argparse.Namespace) -> Bench:
    """The experiment with what the flags say instead; raises `InputError`."""
    bench = read_experiment(find_experiment(args.experiment))
    changes: dict[str, Any] = {
        "world": args.world,
        "model": args.model,
        "drafters": None if args.drafter is None else tuple(dict.fromkeys(args.drafter)),
        "prompts": tuple(args.prompts) if args.prompts else None,
        "profile": None if args.profile is None else find_profile(args.profile),
        "limit": args.limit,
        "temperatures": args.temperatures and tuple(dict.fromkeys(args.temperatures)),
        "seeds": None if args.seeds is None else tuple(dict.fromkeys(args.seeds)),
        "repeat": args.repeat,
        "new_tokens": args.max_new_tokens,
        "cluster": args.cluster,
        "local": args.local,
        "users": None if args.users is None else tuple(sorted(set(args.users))),
        "answers": args.answers,
        "nothing_learnt": args.nothing_learnt or None,
    }
    if args.model not in (None, SYNTHETIC) and bench.is_synthetic and args.drafter is None:
        changes["drafters"] = (BUNDLED,)
    bench = replace(bench, **{name: value for name, value in changes.items() if value is not None})
    for flag, value in (("--profile", args.profile), ("--acceptance", args.acceptance)):
        if value is not None and not bench.is_synthetic:
            raise InputError(
                f"{flag} is for a synthetic drafter; expected an experiment with model synthetic, got "
                f"{bench.model!r:.80}"
            )
        if value is not None and bench.declared:
            raise InputError(f"{flag}: expected none with an experiment that declares its drafters")
    if args.acceptance is not None and not 0 < args.acceptance <= ACCEPTANCE_MAX:
        raise InputError(
            f"--acceptance: expected a share above 0, up to {ACCEPTANCE_MAX:g}, got {args.acceptance:g}"
        )
    if args.profile is not None and args.acceptance is not None:
        raise InputError("expected one of --profile and --acceptance, got both")
    if args.profile is not None:
        bench = replace(bench, acceptance=0.0)
    if args.acceptance is not None:
        bench = replace(bench, acceptance=args.acceptance, profile=None)
    if args.local is not None:
        bench = replace(bench, cluster=None)
    if args.methods is not None:
        bench = replace(bench, setups=pick_setups(bench.setups, args.methods.split(",")))
    if args.testbeds is not None:
        bench = replace(bench, testbeds=_pick_testbeds(bench, args.testbeds.split(",")))
    if bench.world == CLUSTER and (args.cluster or args.local or len(bench.testbeds) > 1):
        bench = replace(bench, testbeds=())  # the experiment's boards are not the ones that are there
    _check(bench, args)
    return bench


def kinder(args: argparse.Namespace, bench: Bench) -> str | None:
    """A line for whom asks for a published method and gets it as kindly as ours does it; None where it runs
    as published, too."""
    known, where = _published(args.experiment), ""
    if not known:
        known, where = _published(DEFAULT), f" --experiment {DEFAULT}"
    if bench.world != SIMULATED:
        where += f" --world {SIMULATED}"
    both = {setup.method for setup in bench.setups if setup.published}
    ours = list(
        dict.fromkeys(
            setup.method for setup in bench.setups if setup.method in known and setup.method not in both
        )
    )
    if not ours:
        return None
    names = shlex.quote(",".join(known[method] for method in ours))
    return (
        f"{', '.join(ours)}: as ours does it, kinder than the paper's code (docs/paper.md); "
        f"as published:{where} --methods {names}"
    )


def _published(experiment: str) -> dict[str, str]:
    """What an experiment calls its setups that run as their papers' code does it, by method."""
    setups = read_experiment(find_experiment(experiment)).setups
    return {setup.method: setup.name for setup in setups if setup.published}


def _pick_testbeds(bench: Bench, names: Sequence[str]) -> tuple[Testbed, ...]:
    known = [testbed.name for testbed in bench.testbeds]
    check_names("--testbeds", names, known)
    return tuple(testbed for testbed in bench.testbeds if testbed.name in names)


def _check(bench: Bench, args: argparse.Namespace) -> None:
    _check_samplings(bench)
    _check_model(bench, args)
    _check_drafters(bench)
    _check_places(bench, args)
    _check_loads(bench)
    if args.tune:
        _check_tuning(bench)
    if args.jobs > JOBS_MAX:
        raise InputError(f"--jobs: expected at most {JOBS_MAX}, got {args.jobs}")


def _check_samplings(bench: Bench) -> None:
    if any(seed < 0 for seed in bench.seeds):
        raise InputError(f"--seeds: expected whole numbers from 0, got {min(bench.seeds)}")
    make_samplings(bench.temperatures, bench.seeds)
    if bench.world == SIMULATED and bench.repeat > 1:
        raise InputError(
            f"--repeat: virtual time gives the same figures every time; expected 1, got {bench.repeat}"
        )


def _check_model(bench: Bench, args: argparse.Namespace) -> None:
    """A synthetic model has chance for drafters and prompts."""
    if not bench.is_synthetic:
        return
    if bench.acceptance == 0 and bench.profile is None and not bench.declared:
        raise InputError("--model: synthetic is for experiments that say its `acceptance`, or its `profile`")
    if bench.profile is not None:
        known = bench.profile.temperatures
        if missing := [each for each in bench.temperatures if each not in known]:
            raise InputError(
                f"--temperatures: expected some of {', '.join(f'{each:g}' for each in known)}, which the "
                f"profile {bench.profile.name} tells, got {missing[0]:g}"
            )
    for flag, value in (("--drafter", args.drafter), ("--prompts", args.prompts)):
        if value is not None:
            raise InputError(
                f"{flag}: expected none with model synthetic, which draws prompts and guesses by chance"
            )


def _check_drafters(bench: Bench) -> None:
    """What flags can make of drafters; a file's own are checked as it is read."""
    for name in () if bench.is_synthetic else bench.drafters:
        if name != RANDOM:
            check_drafter(name)
    if NONE in bench.drafters and len(bench.drafters) > 1:
        raise InputError(f"--drafter: expected {NONE} alone, got {', '.join(bench.drafters)}")
    if len(bench.drafters) > DRAFTERS_MAX:
        raise InputError(f"--drafter: expected at most {DRAFTERS_MAX}, got {len(bench.drafters)}")
    for setup in bench.setups:
        missing = [name for name in setup.drafters or () if name not in bench.drafters]
        if missing:
            raise InputError(
                f"--drafter: method {setup.name!r} of the experiment needs {missing[0]!r}, got "
                f"{', '.join(bench.drafters)}"
            )


def _check_places(bench: Bench, args: argparse.Namespace) -> None:
    """There are devices of the kind that the world has, and a method that runs on them."""
    if bench.world != CLUSTER and (args.cluster or args.local):
        raise InputError(
            f"--cluster and --local are for --world cluster; the experiment's world is {bench.world}"
        )
    if bench.world != CLUSTER and not bench.testbeds:
        raise InputError(
            f"--world {bench.world}: expected an experiment with a testbed, got {bench.name!r} without one"
        )
    if bench.testbeds and not any(
        setup.runs_on(testbed.name) for testbed in bench.testbeds for setup in bench.setups
    ):
        raise InputError(
            "--methods and --testbeds: expected a method that is run on one of the testbeds, got none"
        )


def _check_loads(bench: Bench) -> None:
    if bench.nothing_learnt and bench.world != SIMULATED:
        raise InputError(
            f"--nothing-learnt is for virtual time: expected --world simulated, got {bench.world}"
        )
    if bench.steps and (bench.users or bench.answers):
        flag = "--users" if bench.users else "--answers"
        raise InputError(
            f"{flag}: expected none with experiment {bench.name!r}, whose tables [[step]] say how many users "
            "there are"
        )
    if bench.steps and bench.world != SIMULATED:
        raise InputError(
            "--world: loads are run in virtual time; expected simulated with tables [[step]], got "
            f"{bench.world}"
        )
    if bench.answers and not bench.users:
        raise InputError("--answers is for loads: expected --users, too")
    if not bench.users:
        return
    if bench.world != SIMULATED:
        raise InputError(
            f"--users: loads are run in virtual time; expected --world simulated, got {bench.world}"
        )
    if max(bench.users) > USERS_MAX:
        raise InputError(f"--users: expected at most {USERS_MAX} at once, got {max(bench.users)}")


def _check_tuning(bench: Bench) -> None:
    if len(bench.drafters) > 1:
        raise InputError(
            "--tune finds parameters for one drafter; expected an experiment with one, got "
            f"{', '.join(bench.drafters)}"
        )
    if bench.users:
        raise InputError("--tune works on single answers: expected no --users")
    if bench.steps:
        raise InputError("--tune works on single answers: expected an experiment without tables [[step]]")
    if bench.world != SIMULATED:
        raise InputError(f"--tune works in virtual time: expected --world simulated, got {bench.world}")
