"""Slices of every supported family compute what transformers computes with the whole model, for chains and
for trees."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import VARIANTS, VOCABULARY_SIZE, make_variant
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Submit
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import METHODS, make_method
from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment, SegmentPart
from flowspec.core.stage.events import RunLayers
from flowspec.draft.language import LanguageModelDrafter
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.sampler import F32
from tests.model.slices import CPU, assert_faithful, load, load_stages, pipeline
from tests.nightly import nightly, seeds
from tests.pipeline import Pipeline

MECHANISMS = {
    "llama-grouped": 3,
    "mistral-sliding": 4,
    "lfm2": 3,
    "qwen3.5-text": 4,
    "gemma4": 1,
    "qwen3-moe": 3,
}
"""Variants that differ in what a slice keeps of the text, and how many stages each is cut into: keys of all
positions, of a window, convolutions, states, keys that layers share, experts. A method knows of no family."""


@pytest.mark.parametrize(("variant", "stages"), nightly(MECHANISMS, dict.fromkeys(VARIANTS, 3)).items())
def test_every_method_equals_the_plain_model(variant: str, stages: int, tmp_path: Path) -> None:
    """Two requests at once; a drafter of the same weights in bfloat16 that is now right and now wrong, beside
    wrong siblings."""
    folder = make_variant(tmp_path, variant)
    reference = Reference(ModelFiles(str(folder)), "float32")
    drafter = LanguageModelDrafter.load(ModelFiles(str(folder)), "bfloat16", CPU, context=200, coupled=False)
    slices = load_stages(folder, stages)
    asked = [
        (tuple(range(7, 29)), Sampling()),
        (tuple(range(90, 112)), Sampling(temperature=0.8, top_p=0.95, seed=4)),
    ]
    for number, method in enumerate(METHODS):
        is_drafted = method != "ar"
        made = make_method(method, nodes=6, depth=2, **({"width": 2} if is_drafted else {}))
        drafters = [drafter] if is_drafted else []
        traits = [DrafterTraits(context=each.context) for each in drafters]
        run = pipeline(
            slices, HeadCore(context=200, stage_count=stages, method=made, drafters=traits), drafters
        )
        cases = {2 * number + place: case for place, case in enumerate(asked)}
        for request, (prompt, sampling) in cases.items():
            run.give(
                Submit(
                    request=request, prompt=prompt, new_tokens_max=6, sampling=sampling, stop_ids=frozenset()
                )
            )
        run.settle()
        for request, (prompt, sampling) in cases.items():
            expected = reference.generate(prompt, sampling, 6, frozenset())
            assert run.answers[request] == expected, f"{folder.name}: {method}"
        sent = sum(end.statistics.nodes_sent for end in run.ends.values())
        assert sent >= 10 + 6 * (is_drafted and stages > 1), f"guesses took part in {method}: {sent} nodes"


@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_each_node_of_a_random_tree_gets_the_logits_of_its_path(
    variant: str, seed: int, tmp_path: Path
) -> None:
    """Random trees of two requests in shared random segments over three slices, with commits and dead
    branches between."""
    folder, rng = make_variant(tmp_path, variant), random.Random(seed)
    slices = load_stages(folder, 3)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    seen: dict[tuple[int, int], F32] = {}
    run = pipeline(slices, HeadCore(context=400, stage_count=3))

    def run_layers(stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
        if stage < 2:
            return slices[stage].run(job, payload)
        rows, hidden = slices[2].forward(job, payload)
        logits = slices[2].logits(hidden)
        part_rows = [(part.request, int(token)) for part in job.parts for token in part.tokens]
        for row, (request, token) in zip(rows, part_rows, strict=True):
            seen[request, tokens_of[request].index(token)] = logits[row]
        return (
            rows,
            hidden,
            (-1,) * len(rows),
        )  # nothing is drawn, or all nodes with other tokens would die at once

    run.run_layers = run_layers
    tokens_of: dict[int, list[int]] = {}
    paths: dict[int, list[list[int]]] = {}
    for request in (1, 2):
        # Tokens of one tree are distinct, so that a row is known by its token.
        tokens_of[request] = rng.sample(range(VOCABULARY_SIZE), 70)
        paths[request] = [tokens_of[request][: n + 1] for n in range(20)]
    parents = {request: list(range(-1, 19)) for request in (1, 2)}
    alive = {request: {19} for request in (1, 2)}
    committed: dict[int, list[int]] = {1: [], 2: []}
    opens = {
        r: Open(
            request=r, epoch=0, keep=0, length=20, root=19, slots=200, sampling=Sampling(), answer_start=20
        )
        for r in (1, 2)
    }

    def send(number: int, rows: dict[int, list[int]], *, prompt: bool = False) -> None:
        parts = tuple(
            SegmentPart(
                commit=Commit(request=request, epoch=0, base=20, path=tuple(committed[request])),
                opening=opens[request],
                ids=tuple(nodes),
                parents=tuple(parents[request][node] for node in nodes),
                tokens=tuple(tokens_of[request][node] for node in nodes),
                positions=tuple(len(paths[request][node]) - 1 for node in nodes),
                committed=(prompt,) * len(nodes),
            )
            for request, nodes in rows.items()
            if nodes
        )
        run.send(Segment(segment=number, parts=parts))

    send(0, {1: list(range(20)), 2: list(range(20))}, prompt=True)
    for number in range(1, 9):
        rows: dict[int, list[int]] = {1: [], 2: []}
        for request in (1, 2):
            for _ in range(rng.randint(0, 6)):
                parent = rng.choice(sorted(alive[request]))
                node = len(parents[request])
                parents[request].append(parent)
                paths[request].append([*paths[request][parent], tokens_of[request][node]])
                alive[request].add(node)
                rows[request].append(node)
        send(number, rows)
        for request in (1, 2):
            root = committed[request][-1] if committed[request] else 19
            children = [node for node in alive[request] if parents[request][node] == root]
            if children and rng.random() < 0.5:
                chosen = rng.choice(children)
                committed[request].append(chosen)
                alive[request] = {
                    n
                    for n in alive[request]
                    if paths[request][n][: len(paths[request][chosen])] == paths[request][chosen]
                }
    checked = 0
    inner = {(request, parents[request][node]) for request, node in seen}
    for request, leaf in seen.keys() - inner:
        with torch.inference_mode():
            expected = plain(input_ids=torch.tensor([paths[request][leaf]]), use_cache=False).logits[0]
        node = leaf
        while (request, node) in seen:  # the leaf's path holds those of all above it
            np.testing.assert_allclose(
                seen.pop((request, node)),
                expected[len(paths[request][node]) - 1].numpy(),
                atol=2e-4,
                rtol=1e-4,
                err_msg=f"request {request}, node {node}",
            )
            checked += node >= 20
            node = parents[request][node]
    assert not seen
    assert checked >= 15, "the trees were too small to show anything"


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_slices_are_faithful_to_the_plain_model(dtype: str, tmp_path: Path) -> None:
    assert_faithful(make_variant(tmp_path, "llama-grouped"), dtype)


def test_slices_hold_their_own_tensors_only_and_count_them(tmp_path: Path) -> None:
    make_variant(tmp_path / "tied", "llama-tied")
    make_variant(tmp_path / "apart", "llama-grouped")
    for name in ("tied", "apart"):
        whole = load(tmp_path / name, [0, 8])[0]
        first, middle, last = load(tmp_path / name, [0, 2, 6, 8])
        assert middle.pieces.embedding is None
        assert middle.pieces.lm_head is None
        doubled = (
            VOCABULARY_SIZE * 64 * 4 if name == "tied" else 0
        )  # the embedding is on the first and on the last slice
        assert first.weight_bytes + middle.weight_bytes + last.weight_bytes == whole.weight_bytes + doubled


def test_rows_that_die_between_layers_leave_the_others_as_they_were(tmp_path: Path) -> None:
    part = load(make_variant(tmp_path, "llama-grouped"), [0, 8])[0]
    part.open_cache(1, 64)
    jobs = []

    def capture(stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
        jobs.append(job)
        return part.run(job, payload)

    run = Pipeline(HeadCore(context=60, stage_count=1), capture, 1)
    run.give(
        Submit(request=1, prompt=(5, 6, 7, 8), new_tokens_max=1, sampling=Sampling(), stop_ids=frozenset())
    )
    run.settle()
    job = jobs[0]
    _, full = part.forward(job, None)
    asked = 0

    def die_at_the_third_layer() -> frozenset[int]:
        nonlocal asked
        asked += 1
        return frozenset({3}) if asked >= 3 else frozenset()

    rows, hidden = part.forward(job, None, die_at_the_third_layer)
    assert rows == (0, 1, 2)
    np.testing.assert_allclose(hidden.numpy(), full[:3].numpy(), atol=1e-5)
    asked = 0
    rows, features, tokens, _ = part.run(job, None, die_at_the_third_layer)
    assert (rows, features.shape, len(tokens)) == ((0, 1, 2), (3, 0), 3)
    rows, hidden = part.forward(job, None, lambda: frozenset({0, 1, 2, 3}))
    assert (rows, hidden.shape[0]) == ((), 0)
