"""How well a bundled model does on the shipped prompts, which it was not trained on.

A well-formed answer ends by itself within the limit, is clean text, and ends as a sentence does (for code: in
something that Python can parse line by line is not asked). A sum is right if the last number it states is the
result.

    python -m lab.recipe.measure [--model FOLDER] [--json]
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from flowspec.bench.cases import Prompt, read_prompts
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.text import UNFINISHED, Tokenizer, recommended
from lab.plain_model import PlainModel
from lab.recipe.flags import RecipeParser
from lab.recipe.talk import ABOUT, is_held_out, sum_key, work_out

NEW_TOKENS_MAX = 300
SUM = re.compile(r"(\d+) ([-+x/]) (\d+)")


def is_well_formed(prompt: Prompt, text: str, *, has_ended: bool) -> bool:
    """Ends by itself, holds no broken characters, and reads as a whole."""
    text = text.strip()
    if not has_ended or not text or UNFINISHED in text or "<|" in text:
        return False
    if prompt.domain == "code":
        return True
    if prompt.domain == "stories" and text.count(".") < 3:
        return False
    return text[-1] in '.!?")'


def right_answer(prompt: Prompt) -> int | None:
    """The number that a sum must end in; None for other prompts."""
    match = SUM.search(prompt.turns[0])
    return work_out(int(match[1]), match[2], int(match[3]))[0] if match and prompt.domain == "sums" else None


def is_untrained(prompt: Prompt) -> bool:
    """Whether the training text leaves this prompt out, by the recipe's own split."""
    match = SUM.search(prompt.turns[0])
    if prompt.domain == "sums":
        return match is not None and is_held_out(sum_key(int(match[1]), match[2], int(match[3])))
    if prompt.domain == "stories":
        return is_held_out(prompt.turns[0])
    if prompt.domain == "about":
        return any(len(asks) > 3 and asks[-1] == prompt.turns[0] for asks, _ in ABOUT)
    return True


def main() -> None:
    parser = RecipeParser("measure", __doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--prompts", type=Path, default=bundled_folder("prompts.jsonl"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = ModelFiles(args.model)
    tokenizer, reference = Tokenizer(files), PlainModel(files, "float32")
    stop_ids = recommended(files, files.config()).stop_ids
    rows: dict[str, list[dict[str, object]]] = defaultdict(list)
    for prompt in read_prompts(args.prompts):
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}]))
        tokens = reference.generate(ids, Sampling(), NEW_TOKENS_MAX, stop_ids)
        text = tokenizer.decode(tokens)
        numbers = re.findall(r"\d+", text)
        wanted = right_answer(prompt)
        rows[prompt.domain].append(
            {
                "prompt": prompt.turns[0],
                "answer": text,
                "well_formed": is_well_formed(prompt, text, has_ended=tokens[-1] in stop_ids),
                "right": None if wanted is None else bool(numbers) and int(numbers[-1]) == wanted,
                "untrained": is_untrained(prompt),
            }
        )
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for domain, group in rows.items():
        line = (
            f"{domain:9} {len(group):3} prompts, well-formed {sum(bool(row['well_formed']) for row in group)}"
        )
        if domain == "sums":
            line += f", right {sum(bool(row['right']) for row in group)}"
        print(line)
    every = [row for group in rows.values() for row in group]
    print(
        f"all       {len(every):3} prompts, well-formed {sum(bool(row['well_formed']) for row in every)}; "
        f"untrained {sum(bool(row['untrained']) for row in every)}"
    )


if __name__ == "__main__":
    main()
