"""Makes the pictures of the documents: `python -m lab.pictures` writes timeline.png and page.webp in
docs/pictures.

Four methods answer one question in virtual time, and `bench` draws them; a recording of docs/recordings is
played in the page, in a headless Chromium (`launch/needs`). `--answer FOLDER` keeps what `bench` made, and
takes it from there if it is there already. Needs `launch/install dev`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

from tests.serve.page.pages import CHROMIUM, installed, scrub
from tests.serve.page.scripted import Script, serving

FOLDER = Path(__file__).parents[1] / "docs/pictures"
RECORDING = FOLDER.parent / "recordings/guesses.json"
METHODS = ("ar", "chunk-pp (published)", "flowspec-paper (published)", "continuous")
QUESTION = "Continue the play:\nCLOWN:\nA fool may say what wise men only think."
"""Of the shipped prompts, one that is answered about as fast as their mean."""
COLOURS = 48
"""Of a plot; more would only make it larger."""
SHOWN_S = (1.0, 2.5)
"""Of the answer, in its own time."""
FRAMES, FRAME_MS = 50, 200
SIZE: ViewportSize = {"width": 1100, "height": 1080}
WIDTH = 800
QUALITY = 60


def answer(folder: Path) -> None:
    """Has the question answered by all methods, if that was not done before."""
    if (folder / "timeline.png").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "plays", "turns": [QUESTION]}) + "\n")
    flags = ["--experiment", "paper-bundled", "--methods", ",".join(METHODS), "--temperatures", "0"]
    flags += ["--prompts", str(prompts), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "flowspec.cli.main", "bench", *flags], check=True)


def shrink(plot: Path, to: Path) -> None:
    with Image.open(plot) as found:
        found.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(to, optimize=True)


def frames(page: Page, recording: Path) -> Iterator[Image.Image]:
    """What the page shows of a recording, instant by instant."""
    page.locator("#file").set_input_files(recording)
    page.locator("#replay").wait_for()
    page.evaluate("document.fonts.ready")
    duration_s = page.locator("#scrub").evaluate("slider => slider.max - slider.min")
    first_s, last_s = SHOWN_S
    for number in range(FRAMES):
        scrub(page, (first_s + (last_s - first_s) * number / FRAMES) / duration_s)
        page.wait_for_timeout(FRAME_MS)  # it draws at most so often
        with Image.open(io.BytesIO(page.screenshot())) as shot:
            yield shot.convert("RGB").resize(
                (WIDTH, round(shot.height * WIDTH / shot.width)), Image.Resampling.LANCZOS
            )


def play(recording: Path, to: Path, size: ViewportSize = SIZE) -> None:
    with sync_playwright() as playwright, serving(Script().app()) as origin:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=installed(CHROMIUM), args=flags)
        page = browser.new_page(viewport=size)
        page.goto(origin)
        page.evaluate("document.getElementById('chat').hidden = true")  # it has no part in a recording
        first, *others = frames(page, recording)
        browser.close()
    first.save(to, save_all=True, append_images=others, duration=FRAME_MS, loop=0, quality=QUALITY, method=4)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures of the documents.")
    parser.add_argument(
        "--answer", type=Path, metavar="FOLDER", help="where bench puts what is drawn (default: nowhere)"
    )
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as nowhere:
        folder = args.answer or Path(nowhere)
        answer(folder)
        shrink(folder / "timeline.png", FOLDER / "timeline.png")
        play(RECORDING, FOLDER / "page.webp")
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
