"""The steps of an accelerator's check, each in a process of its own, which may die of it:

    python -m flowspec.bench.accelerator.steps STEP --device cuda:0 --folder FOLDER [--dtype int8]...

Prints a line of JSON for each thing that was looked at: `found`, or `fault`, which says what is wrong. Steps
leave what later ones need in the folder. What is right is decided here, what to do about it in `report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES
from flowspec.core.protocol.precision import OF_ANY_MODEL, PRECISIONS
from flowspec.errors import FlowSpecError, InputError, first_line
from flowspec.model.trials import NoRightKernelError, run_trial, torch_version

if TYPE_CHECKING:  # what these import may kill a step: it speaks first
    import numpy as np
    import numpy.typing as npt

    from flowspec.bench.exactness import ClusterAnswer
    from flowspec.model.accelerator import Accelerator
    from flowspec.model.slice import Slice

    F32 = npt.NDArray[np.float32]

TEXT = (
    "Once there was a crow who lived in a tall tree beside a river. One day he found a piece of cheese and "
    "sat down to eat it. A fox came by, looked up and asked: What is 17 + 25? It is 42, said the crow, and "
    "kept the cheese. The devices of a cluster each hold some layers of one model, and send what they "
    "computed to the next one."
)
"""What the bundled target reads in every precision."""
PORTIONS = (16, 1, 32, 4, 17, 1)
"""Rows of one pass after another, over and over."""
ROWS_ALONE = 8
"""Of the text's first tokens each runs alone, too."""
SPEED_ROWS = (1, 4, 16)
SPEED_S = 0.5
SPEED_RUNS_MAX = 40
PLAIN = "plain.npy"
PROMPTS, TEMPERATURES, NEW_TOKENS = 3, (0.0, 1.0), 40
METHODS = (WITHOUT_GUESSES, DEFAULT)
THREADS = max(1, (os.cpu_count() or 1) - 1)
"""Of slices on CPUs: one core is left to the head, and to what else runs."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="flowspec-accelerator-step", description=__doc__)
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="what steps leave for one another")
    parser.add_argument("--dtype", action="append", choices=OF_ANY_MODEL, default=[])
    args = parser.parse_args(argv)
    _say(torch=torch_version())
    for dtype in args.dtype or [""]:
        _say(at=dtype)
        try:
            _say(found=STEPS[args.step](args.device, args.folder, dtype))
        except (FlowSpecError, RuntimeError, OSError) as error:  # as torch and CUDA tell theirs
            _say(fault=first_line(error))
    _say(done=True)


def _say(**word: object) -> None:
    print(json.dumps(word), flush=True)


# ---------------------------------------------------------------------------------------------- steps


def torch_step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Which device is used, what it tells of itself (a GPU through torch), and how fast it is at a short
    look."""
    from flowspec.model.accelerator import find
    from flowspec.runtime.health.probe import probe

    here = find(device)
    start_s = _process_s()
    profile = probe(here.device)
    return {
        "device": here.device,
        "is_cpu": here.is_cpu,
        "start_s": round(start_s, 1),
        "facts": here.facts(),
        "free_bytes": here.free_bytes(),
        "gb_per_s": profile.memory_gb_per_s,
        "tflops": dict(profile.tflops),
        "layer_us": profile.layer_us,
    }


def plain_step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    """The whole model's logits through transformers, on the CPU in float32, to compare all others with."""
    import numpy as np

    from flowspec.model.files import BUNDLED, ModelFiles
    from flowspec.model.reference import Reference

    files = ModelFiles(BUNDLED)
    first, *others = read_text()
    logits = np.stack(Reference(files, "float32").forced_logits((first,), others))
    np.save(folder / PLAIN, logits)
    return {"tokens": len(logits), "spread": round(_spread(logits), 3)}


def kernels_step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    """What computes this precision, as it was tried in a process of its own."""
    try:
        found = run_trial(dtype, device)
    except InputError as refusal:
        is_lack = not isinstance(refusal, NoRightKernelError)
        return {"dtype": dtype, "kernel": "", "faults": first_line(refusal, 1000), "is_lack": is_lack}
    return {"dtype": dtype, "kernel": found.kernel, "faults": found.slowed_by}


def slice_step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    """The bundled target as one slice in this precision: logits, whether rows are alone, times, memory."""
    from flowspec.model.accelerator import find, use_threads

    use_threads(THREADS)
    return check_slice(find(device), folder, dtype)


def verify_step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    """The bundled pair on a real daemon with that device, token by token beside step-by-step decoding on
    it."""
    from flowspec.bench.cases import read_prompts
    from flowspec.bench.exactness import judge
    from flowspec.bench.records import EXACT, WRONG
    from flowspec.model.accelerator import find
    from flowspec.model.files import BUNDLED, bundled_folder
    from flowspec.model.step_by_step import StepByStep
    from flowspec.runtime.decoding import Decoding
    from flowspec.runtime.session import ClusterOptions, open_cluster

    prompts = read_prompts(bundled_folder("prompts.jsonl"))
    texts = [prompt.turns[0] for prompt in prompts if prompt.domain == "stories"][:PROMPTS]
    options = ClusterOptions(
        model=BUNDLED,
        dtype=dtype,
        local=1,
        local_device=device,
        local_threads=THREADS,
        log_level="ERROR",
    )
    found: list[ClusterAnswer] = []
    rates: dict[str, float] = {}
    with open_cluster(options, decoding=Decoding()) as cluster:
        for method in METHODS:
            decoding = Decoding(method=method)
            with cluster.session(decoding, lambda text, share: None) as session:
                answers, rates[method] = _answer(session, texts)
                found += answers
        files, stop_ids = cluster.files, _stop_ids(cluster.files, cluster.config)
    plain = StepByStep.load(files, dtype, find(device).device)
    kinds = [judge(plain, one, stop_ids).kind for one in found]
    return {
        "dtype": dtype,
        "answers": len(kinds),
        "tokens": sum(len(one.tokens) for one in found),
        **{kind: kinds.count(kind) for kind in (EXACT, WRONG)},
        "tokens_per_s": {method: round(rate, 1) for method, rate in rates.items()},
        "threads": THREADS,
    }


STEPS = {
    "torch": torch_step,
    "plain": plain_step,
    "kernels": kernels_step,
    "slice": slice_step,
    "verify": verify_step,
}


# -------------------------------------------------------------------------------------------- a slice


def read_text() -> tuple[int, ...]:
    from flowspec.model.files import BUNDLED, ModelFiles
    from flowspec.model.text import Tokenizer

    return tuple(Tokenizer(ModelFiles(BUNDLED)).encode(TEXT))


def check_slice(here: Accelerator, folder: Path, dtype: str) -> dict[str, Any]:
    """`slice_step` on this accelerator. Raises `InputError` where the plain logits are not there."""
    import gc

    import numpy as np

    from flowspec.bench.faithfulness import portions
    from flowspec.model.arithmetic.compiled import threads
    from flowspec.model.files import BUNDLED, ModelFiles
    from flowspec.model.slice import Slice
    from flowspec.model.step_by_step import StepByStep
    from flowspec.model.weights import Span

    if not (folder / PLAIN).is_file():
        raise InputError("there are no plain logits to compare with")
    plain = np.load(folder / PLAIN)
    tokens = read_text()
    files = ModelFiles(BUNDLED)
    count = files.raw_config()["num_hidden_layers"]
    here.give_back()
    free_before, taken_before = here.free_bytes(), here.taken_bytes()
    part = Slice.load(files, Span(first=0, end=count, count=count), dtype, here.device)
    here.wait()
    taken = here.taken_bytes() - taken_before
    whole = StepByStep(part)
    logits = np.concatenate(list(whole.logits(tokens, list(portions(len(tokens), PORTIONS)))))
    off = float(np.abs(logits - plain).max())
    spread = _spread(plain)
    few = tokens[:ROWS_ALONE]
    together, alone = (np.concatenate(list(whole.logits(few, rows))) for rows in ([len(few)], [1] * len(few)))
    apart = np.abs(together - alone).max(axis=1)
    other_bits, apart_max = int((apart > 0).sum()), float(f"{apart.max():.2g}")
    times = {str(rows): pass_ms(here, part, rows) for rows in SPEED_ROWS}
    weights = part.weight_bytes
    part.close_all()
    del part, whole
    gc.collect()
    here.give_back()
    return {
        "dtype": dtype,
        "logits_off": float(f"{off:.2g}"),
        "logits_allowed": float(f"{PRECISIONS[dtype].logits_off * spread:.2g}"),
        "same_choices": int((logits.argmax(axis=1) == plain.argmax(axis=1)).sum()),
        "tokens": len(tokens),
        "rows_alone": {"rows": len(few), "other_bits": other_bits, "off": apart_max},
        "pass_ms": times,
        "threads": threads(),
        "memory": {
            "free_before_bytes": free_before,
            "weight_bytes": weights,
            "taken_bytes": taken,
            "kept_bytes": here.taken_bytes() - taken_before,
            "free_after_bytes": here.free_bytes(),
        },
    }


def pass_ms(here: Accelerator, part: Slice, rows: int) -> float:
    """Milliseconds of a pass of so many rows through the layers, the median of some."""
    from flowspec.bench.profile import pass_task

    run = pass_task(part, rows)
    run()
    here.wait()
    spent: list[float] = []
    while len(spent) < SPEED_RUNS_MAX and sum(spent) < SPEED_S:
        started_s = time.perf_counter()
        run()
        here.wait()
        spent.append(time.perf_counter() - started_s)
    part.close_all()
    return round(1e3 * statistics.median(spent), 2)


def _spread(logits: F32) -> float:
    """How far logits lie apart: the mean of their standard deviations."""
    return float(logits.std(axis=1).mean())


# --------------------------------------------------------------------------------------------- verify


def _answer(session: Any, texts: Sequence[str]) -> tuple[list[ClusterAnswer], float]:
    """What the cluster says to all prompts at all temperatures, and its tokens per second (their median)."""
    from flowspec.bench.exactness import Case, found_of
    from flowspec.core.protocol.messages import Sampling
    from flowspec.model.text import Tokenizer
    from flowspec.runtime.session import Limits

    tokenizer, rates, found = Tokenizer(session.files), [], []
    limits = Limits(new_tokens_max=NEW_TOKENS, stop_ids=_stop_ids(session.files, session.config))
    for temperature in TEMPERATURES:
        for number, text in enumerate(texts):
            ids = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
            case = Case(prompt_id=str(number), prompt=ids, sampling=Sampling(temperature=temperature, seed=1))
            answer, timing = session.ask(ids, case.sampling, limits)
            found.append(found_of(session, case, answer, timing, limits))
            rates.append(timing.tokens_per_s)
    return found, statistics.median(rates)


def _stop_ids(files: Any, config: Any) -> frozenset[int]:
    from flowspec.model.text import recommended

    return recommended(files, config).stop_ids


def _process_s() -> float:
    """Seconds since this process was started, its imports included."""
    import psutil

    return time.time() - float(psutil.Process().create_time())


if __name__ == "__main__":
    main()
