"""Take a picture of the main parts of a report, rendered by a browser.

uv run compressive quickstart
uv run python docs/pictures/report.py runs/quickstart/report.html --browser chromium
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

WIDTH, TALLEST, EDGE = 1280, 2600, 12
SHOWN = ("summary", "maps")
KEPT = "".join(f":not(#{name})" for name in SHOWN)
STYLE = f"section{KEPT}, nav {{ display: none }} "


def photographed(text: str, browser: str) -> Image.Image:
    """Return a screenshot of the page in light mode, cropped to what is not white."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        page.write_text(text, encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            "--blink-settings=preferredColorScheme=1",
            f"--window-size={WIDTH},{TALLEST}",
            f"--screenshot={shot}",
        ]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        image = Image.open(shot).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    return image.crop((0, 0, WIDTH, min(TALLEST, box[3] + EDGE))) if box else image


def main() -> None:
    """Write the image, by default next to this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="page that `compressive report` wrote")
    parser.add_argument("--browser", default="chromium", help="Chromium or Chrome")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    given = parser.parse_args()
    page = given.page.read_text(encoding="utf-8")
    image = photographed(page.replace("</head>", f"<style>{STYLE}</style></head>"), given.browser)
    image.save(given.out, optimize=True)


if __name__ == "__main__":
    main()
