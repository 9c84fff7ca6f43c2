"""Is every family exact, however its layers are split and whatever method decodes, and faithful?

python -m tests.checks.families FOLDER
python -m tests.checks.families FOLDER --families gemma2,olmo2 --dtypes int8,int4 --stages 3
python -m tests.checks.families FOLDER --dtypes gguf

Makes a small checkpoint of random weights for each family and variant in FOLDER (those that are there are
used), in `gguf` a file with matrices in Q4_0 and Q8_0, runs it on local daemons, and makes the two statements
of `flowspec verify`: answers are those of decoding step by step, and logits are transformers'. One prompt is
longer than any window. What is done is kept in FOLDER/families.jsonl, and the same command goes on from
there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from flowspec.bench import faithfulness
from flowspec.bench.checkpoints import VARIANTS, VOCABULARY_SIZE, make_variant
from flowspec.bench.console import progress, show
from flowspec.bench.exactness import Case, ClusterAnswer, answer, judge
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.cli.options import positives, reals
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import ACTIVATIONS, FILED, PRECISIONS
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.accelerator import use_threads
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import recommended
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, open_cluster
from tests.command import Parser, chosen, run_command
from tests.ggufs import SHAPES, convert, make

FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama 2": ("llama-grouped", "llama-tied"),
    "Llama 3": ("llama-rope3",),
    "Mistral": ("mistral-sliding",),
    "Qwen2": ("qwen2", "qwen2-sliding"),
    "Qwen3": ("qwen3",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3-text", "gemma3"),
    "Gemma 4": ("gemma4", "gemma4-text", "gemma4-mixture", "gemma4-unified", "gemma4-unified-text"),
    "Phi-3": ("phi3", "phi3-longrope"),
    "SmolLM3": ("smollm3",),
    "Granite": ("granite",),
    "OLMo 2": ("olmo2",),
    "OLMoE": ("olmoe",),
    "Qwen3-MoE": ("qwen3-moe", "qwen3-moe-fused"),
    "Mixtral": ("mixtral",),
    "GLM-4.5": ("glm4-moe",),
    "LFM2": ("lfm2",),
    "GPT-OSS": ("gpt-oss",),
    "Qwen3.5": ("qwen3.5", "qwen3.5-text"),
    "Qwen3.5-MoE": ("qwen3.5-moe", "qwen3.5-moe-fused"),
}
"""The checkpoints of `VARIANTS` that stand for a family."""
IN_FILES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0)
LONG_PROMPT = 70
"""Tokens; more than any window of a variant, and than Llama 3's and Phi-3's scaled positions begin at."""
CONTEXT = 300
PACKED_METHODS = ("ar", "continuous")
"""With packed weights these are enough: methods do not know of precisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint in one precision, and what is asked of it."""

    variant: str
    dtype: str
    stages: tuple[int, ...]
    methods: tuple[str, ...]
    temperatures: tuple[float, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended; `refused` says why a model was not run, `faithful` is `Faithfulness.report` of one
    that was."""

    job: Job
    answers: int = 0
    tokens: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    faithful: dict[str, Any] | None = None
    refused: str = ""
    spent_s: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the model ran, exactly and faithfully."""
        return self.faithful is not None and not self.faithful["faults"] and not self.kinds.get(WRONG)


def jobs(args: argparse.Namespace) -> list[Job]:
    return [
        Job(
            variant=variant,
            dtype=dtype,
            stages=args.stages,
            methods=args.methods or (METHODS if ACTIVATIONS[dtype] == dtype else PACKED_METHODS),
            temperatures=args.temperatures,
            new_tokens=args.new_tokens,
        )
        for dtype in args.dtypes
        for variant in args.families
        if dtype != FILED or variant in SHAPES
    ]


def checkpoint(job: Job, folder: Path) -> Path:
    """The job's model in this folder, made if it is not there."""
    path = folder / f"{job.variant}.gguf" if job.dtype == FILED else folder / job.variant
    if job.dtype == FILED:
        if not path.is_file():
            convert(make(folder / f"{job.variant}-of-gguf", job.variant), path, IN_FILES)
    elif not (path / "model.safetensors").is_file():
        make_variant(path, job.variant)
    return path


def cases(temperatures: Sequence[float]) -> list[Case]:
    """A short and a long prompt at every temperature."""
    rng = random.Random(5)
    prompts = {
        "short": (5, 6, 7),
        "long": tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(LONG_PROMPT)),
    }
    samplings = [Sampling(temperature=temperature, seed=1) for temperature in temperatures]
    return [
        Case(prompt_id=name, prompt=prompt, sampling=sampling)
        for sampling in samplings
        for name, prompt in prompts.items()
    ]


def checked(job: Job, model: Path, daemons: Sequence[LocalDaemon]) -> Outcome:
    """Runs a job and compares; refused is what fails before the first answer."""
    started_s = time.monotonic()
    files = ModelFiles(str(model))
    limits = Limits(new_tokens_max=job.new_tokens, stop_ids=recommended(files, files.config()).stop_ids)
    found: list[ClusterAnswer] = []
    try:
        for each in answers(job, model, daemons, limits):
            found.append(each)
    except FlowSpecError as error:
        if found:
            raise
        return Outcome(job=job, refused=str(error), spent_s=time.monotonic() - started_s)
    plain = StepByStep.load(files, job.dtype)
    verdicts = [judge(plain, one, limits.stop_ids) for one in found]
    return Outcome(
        job=job,
        answers=len(found),
        tokens=sum(len(one.tokens) for one in found),
        kinds=dict(Counter(verdict.kind for verdict in verdicts)),
        faithful=faithfulness.check(files, job.dtype, plain).report(),
        spent_s=time.monotonic() - started_s,
    )


def answers(job: Job, model: Path, daemons: Sequence[LocalDaemon], limits: Limits) -> Iterator[ClusterAnswer]:
    """All answers, on the first one, three, ... of the daemons. The model drafts for itself."""
    for count in job.stages:
        with running(job, model, daemons[:count]) as cluster:
            for method in job.methods:
                with cluster.session(
                    Decoding(method=method, drafters=(str(model),)), lambda text, share: None
                ) as session:
                    for case in cases(job.temperatures):
                        yield answer(session, case, limits)


@contextlib.contextmanager
def running(job: Job, model: Path, daemons: Sequence[LocalDaemon]) -> Iterator[OpenCluster]:
    """A cluster of these daemons, from a cluster file as a person writes it."""
    lines = [f'[[device]]\nname = "{daemon.name}"\naddress = "{daemon.address}"\n' for daemon in daemons]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(lines))
        file.flush()
        with open_cluster(
            ClusterOptions(model=str(model), dtype=job.dtype, cluster=Path(file.name), context=CONTEXT)
        ) as cluster:
            yield cluster


def kept(path: Path) -> dict[Job, Outcome]:
    """What an earlier run did, by job; half a line at the end is removed from the file."""
    if not path.exists():
        return {}
    found = {}
    try:
        text = path.read_text("utf-8")
        whole_lines = text[: text.rfind("\n") + 1]
        for line in whole_lines.splitlines():
            raw: dict[str, Any] = json.loads(line)
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in raw.pop("job").items()
            }
            found[Job(**fields)] = Outcome(job=Job(**fields), **raw)
        if whole_lines != text:
            path.write_text(whole_lines, "utf-8")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: expected results of an earlier run, got {error}; remove it") from None
    return found


def command(args: argparse.Namespace) -> int:
    results, done = args.folder / "families.jsonl", []
    args.folder.mkdir(parents=True, exist_ok=True)
    earlier = kept(results)
    use_threads(1)  # the daemons want the other cores
    todo = jobs(args)
    with (
        LocalCluster(max(args.stages), log_level="CRITICAL") as local,
        progress("checking families", len(todo)) as step,
    ):
        for job in todo:
            step(f"{job.variant} in {job.dtype}")
            outcome = earlier.get(job)
            if outcome is None:
                outcome = checked(job, checkpoint(job, args.folder), local.wait())
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            done.append(outcome)
    if args.json:
        print(
            json.dumps(
                {
                    "outcomes": [asdict(each) for each in done],
                    "from_earlier_runs": sum(job in earlier for job in todo),
                }
            )
        )
    else:
        report(done, results, sum(job in earlier for job in todo))
    return 0 if all(each.is_right for each in done) else 1


def report(done: Sequence[Outcome], results: Path, earlier: int) -> None:
    names = {variant: family for family, variants in FAMILIES.items() for variant in variants}
    rows: list[list[Any]] = []
    for each in done:
        figures: list[Any] = ["refused", *[None] * 6]
        if each.faithful is not None:
            found = each.faithful
            counts = [each.kinds.get(kind, 0) for kind in (EXACT, WRONG)]
            logit = _share(found["largest"], found["limit"])
            change = None if found["change"] is None else f"{found['change']:+.2%}"
            figures = [each.answers, each.tokens, *counts, logit, change]
            figures.append(_share(found["matrix"]["share"], found["matrix_limit"]))
        rows.append(
            [f"{names[each.job.variant]} ({each.job.variant})", each.job.dtype, *figures, round(each.spent_s)]
        )
    columns = ["family (checkpoint)", "precision", "answers", "tokens", "exact", "wrong"]
    columns += ["logit / limit", "perplexity", "matrix / limit", "s"]
    methods = dict.fromkeys(", ".join(each.job.methods) for each in done)
    show(
        f"{'/'.join(map(str, done[0].job.stages))} stages; {'; with packed weights '.join(methods)}",
        columns,
        rows,
    )
    for each in done:
        if each.refused:
            print(f"{each.job.variant} in {each.job.dtype} is refused: {each.refused}")
        for fault in [] if each.faithful is None else each.faithful["faults"]:
            print(f"{each.job.variant} in {each.job.dtype} is not faithful: {fault}")
    if earlier:
        print(f"{earlier} of these are from an earlier run; remove {results} to check them again")


def _share(value: float | None, limit: float | None) -> str | None:
    """Of what is allowed; None where one is no number."""
    return None if value is None or limit is None else f"{value / limit:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.families", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for checkpoints and results")
    parser.add_argument(
        "--families",
        type=chosen(tuple(VARIANTS)),
        default=tuple(VARIANTS),
        metavar="NAME[,NAME...]",
        help="checkpoints (default: all)",
    )
    parser.add_argument(
        "--dtypes",
        type=chosen(tuple(PRECISIONS)),
        default=("float32",),
        metavar="float32,int8",
        help="precisions (default: float32)",
    )
    parser.add_argument(
        "--stages",
        type=positives,
        default=(1, 3, 4),
        metavar="1,3,4",
        help="numbers of stages (default: 1,3,4)",
    )
    parser.add_argument(
        "--methods",
        type=chosen(METHODS),
        metavar="NAME[,NAME...]",
        help="default: all; with packed weights ar,continuous",
    )
    parser.add_argument("--temperatures", type=reals, default=(0.0, 1.0), metavar="0,1", help="default: 0,1")
    parser.whole("--new-tokens", 16, "of each answer")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
