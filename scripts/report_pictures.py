"""The pictures in docs/pictures: a report of the bundled model as a browser shows it, and a sweep's hit rates.

    python scripts/report_pictures.py --work /tmp/report-pictures

Collects, trains, evaluates and sweeps by the commands that anyone would give, then has Chromium take the screenshots:
wide and narrow, light and dark. What lies in the work folder already is not made again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from expertcast.cli import main as expertcast
from expertcast.predictors import ExpertcastError

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NAMES = "frequency", "previous_token", "router_input", "next_norm", "quasi_hidden", "linear", "early_attention"
SHOTS = {
    "report-light": ("", 1240, 1330, False),
    "report-dark": ("means", 1240, 1330, True),
    "report-experts": ("each", 1240, 1330, False),
    "narrow-light": ("", 400, 1330, False),
    "narrow-dark": ("", 400, 1330, True),
}
"""By name, the heading that the picture begins with ("" for the whole page), width and height in pixels, and whether it
is dark."""
FROM_HEADING = (
    "<script>for (const at = document.getElementById('{}'); at.previousSibling; ) at.previousSibling.remove();</script>"
)
"""A browser without a window takes pictures of a page's top only: what comes before is taken away."""
COLOURS = 240
"""Of each picture's palette: flat areas and text need no more, and files stay below 200 kB."""
GAP = 16


def commands(work: Path, tokens: int, steps: int) -> dict[str, list[str]]:
    """What makes each folder, in order."""
    traces, checkpoint, report, sweep, tracker = (
        str(work / name) for name in ("traces", "estimator", "report", "sweep", "next_token")
    )
    return {
        traces: ["collect", "reference", "--data", "reference", "--tokens", str(tokens), "--out", traces],
        checkpoint: ["train", traces, "--predictor", "estimator", "--out", checkpoint, "--set", f"steps={steps}"],
        report: ["eval", traces, "--predictor", checkpoint, *NAMES, "--report", report],
        tracker: ["train", traces, "--predictor", "next_token", "--out", tracker, "--set", f"steps={steps}"],
        sweep: ["simulate", traces, "--sweep", "--no-quality", "--next-token", tracker, "--tokens", "1000", "--out",
                sweep],
    }  # fmt: skip


def browser(named: str | None) -> str:
    """The browser's program.

    Raises:
        ExpertcastError: there is none.
    """
    found = next((path for name in ([named] if named else BROWSERS) if (path := shutil.which(name))), None)
    if found is None:
        raise ExpertcastError(f"no browser {named or 'of ' + ', '.join(BROWSERS)}: install chromium, or name one")
    return found


def screenshot(program: str, page: Path, heading: str, width: int, height: int, dark: bool) -> Image.Image:
    """What a page looks like from a heading on."""
    with tempfile.TemporaryDirectory() as folder:
        path, copy = Path(folder) / "shot.png", Path(folder) / "page.html"
        cut = FROM_HEADING.format(heading) if heading else ""
        copy.write_text(page.read_text().replace("</body>", cut + "</body>"))
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000",
             f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={path}", *scheme,
             copy.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        return Image.open(path).convert("RGB").copy()


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Images of one height in a row."""
    joined = Image.new("RGB", (sum(image.width + GAP for image in images) - GAP, images[0].height), "white")
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width + GAP
    return joined


def write(image: Image.Image, path: Path) -> None:
    """Write a small PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {image.width} x {image.height}, {path.stat().st_size / 1e3:.0f} kB")


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing in the work folder, and all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of traces, checkpoints, report and sweep")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures (default: docs/pictures)")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to collect (default: 20000)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the trained predictors (default: 300)")
    parser.add_argument("--browser", help="program (default: the first there is of " + ", ".join(BROWSERS) + ")")
    options = parser.parse_args(argv)
    try:
        program = browser(options.browser)
    except ExpertcastError as error:
        print(f"report_pictures: {error}", file=sys.stderr)
        return 2
    options.work.mkdir(parents=True, exist_ok=True)
    for folder, command in commands(options.work.resolve(), options.tokens, options.steps).items():
        if not Path(folder).exists() and (status := expertcast(command)):
            return status
    page = options.work / "report" / "index.html"
    shots = {name: screenshot(program, page, *shot) for name, shot in SHOTS.items()}
    narrow = [shots.pop(f"narrow-{scheme}") for scheme in ("light", "dark")]
    for name, image in {**shots, "report-narrow": side_by_side(narrow)}.items():
        write(image, options.out / f"{name}.png")
    write(Image.open(options.work / "sweep" / "hit_rate.png").convert("RGB"), options.out / "sweep-hit-rate.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
