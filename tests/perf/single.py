"""Single-stage decoding beside `transformers.generate`: the same model, dtype and threads, in turns, as a
ratio.

python -m tests.perf.single [--model bundled] [--dtype float32] [--tokens 200] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from flowspec.core.protocol.messages import Sampling
from flowspec.model.slice import DTYPES
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_session
from tests.perf.beside import answer

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.single", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    ours: list[float] = []
    plain: list[float] = []
    options = ClusterOptions(model=args.model, dtype=args.dtype, local=1)
    with open_session(options, Decoding(method="ar"), lambda text, share: None) as session:
        folder = session.files.path("config.json").parent
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype]).eval()
        for number in range(args.rounds + 1):
            prompt = [(7 * i + number) % 200 + 10 for i in range(PROMPT_TOKENS)]
            limits = Limits(new_tokens_max=args.tokens, stop_ids=frozenset())
            timing, _ = answer(session, prompt, Sampling(), limits)
            started_s = time.monotonic()
            with torch.inference_mode():
                ids = torch.tensor([prompt])
                first = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=1,
                    do_sample=False,
                    pad_token_id=0,
                )
                first_s = time.monotonic() - started_s
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.tokens,
                    min_new_tokens=args.tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            whole_s = time.monotonic() - started_s - first_s
            assert first.shape[1] == PROMPT_TOKENS + 1
            assert out.shape[1] == PROMPT_TOKENS + args.tokens
            if number:  # the first round warms up
                ours.append(timing.tokens_per_s)
                plain.append((args.tokens - 1) / (whole_s - first_s))
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    found = {
        "dtype": args.dtype,
        "flowspec_tokens_per_s": round(statistics.median(ours), 1),
        "transformers_tokens_per_s": round(statistics.median(plain), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "world": "cluster",
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"one stage, one thread, {args.dtype}: {found['flowspec_tokens_per_s']} tokens/s; "
            f"transformers.generate {found['transformers_tokens_per_s']}"
        )
        print(f"ratio {found['ratio']} (median of {', '.join(map(str, found['ratios']))})")


if __name__ == "__main__":
    main()
