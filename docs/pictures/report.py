"""Combine parts of a report of two runs into one image, rendered by a browser.

uv run compressive report simclr c-simclr --out report.html
uv run python docs/pictures/report.py report.html --browser chromium
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

WIDTH, TALLEST, EDGE = 1428, 2000, 8
CHANGES = ("contrast-", "saturation+", "saturation-")  # a color jitter's, of the last data set
STYLE = """
html { zoom: .6 } body { max-width: none; padding: 14px; display: grid; gap: .75rem;
  grid-template-columns: repeat(12, 1fr) }
.two { grid-column: span 2 } .three { grid-column: span 3 } .six { grid-column: span 6 }
.head { display: flex; gap: 1rem; align-items: baseline } .head p, .head h2 { margin: 0 }
.head h2 { border: 0; padding: 0 } .three ~ .head { margin-top: 1rem }
figure { display: flex; flex-direction: column; height: 100% } .three svg { flex: 1 }
figure p.soft { font-size: .9rem } figure .scroll { height: 100%; overflow: hidden }
table.heat { height: calc(100% - 1.8rem) } .heat th, .heat td { vertical-align: middle }
"""


def section(page: str, name: str) -> tuple[str, dict[str, str]]:
    """Return the heading of a section and its figures by title; later ones replace earlier ones."""
    found = re.search(rf'<section id="{name}"><h2>(.*?)</h2>(.*?)</section>', page, re.DOTALL)
    if found is None:
        raise SystemExit(f"the report has no section {name!r}; evaluate both runs in full first")
    figures = re.findall(r"<figure>.*?</figure>", found[2], re.DOTALL)
    titles = (re.search(r"<(fig)?caption>(.*?)</(fig)?caption>", f, re.DOTALL) for f in figures)
    return found[1], {t[2] if t else "": f for t, f in zip(titles, figures, strict=True)}


def composed(page: str) -> str:
    """Return a page with only the selected parts, in two rows under their headings."""
    heads, figures = {}, {}
    for name in ("maps", "corruptions", "curves", "plane", "reliability", "smoothness"):
        heads[name], figures[name] = section(page, name)
    note = re.search(r'<section id="corruptions">.*?(<p>.*?</p>)', page, re.DOTALL)
    changes = [figures["smoothness"][change] for change in CHANGES]
    body = [
        head("six", heads["maps"]),
        head("six", heads["corruptions"], note[1] if note else ""),
        *(card("three", figure) for figure in figures["maps"].values()),
        *(card("two", figure) for figure in figures["corruptions"].values()),
        *(head("two", heads[name]) for name in ("curves", "plane", "reliability")),
        head("six", heads["smoothness"]),
        card("two", figures["curves"]["Nearest neighbors, held-out images"]),
        card("two", figures["plane"]["Reducible part"]),
        card("two", next(iter(figures["reliability"].values()))),
        *(card("two", figure) for figure in changes),
    ]
    start = page[: page.index("</head>")]
    return f"{start}<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"


def head(width: str, title: str, note: str = "") -> str:
    """Return a heading of this width."""
    return f'<div class="head {width}"><h2>{title}</h2>{note}</div>'


def card(width: str, figure: str) -> str:
    """Return a figure of this width."""
    return f'<div class="{width}">{figure}</div>'


def photographed(text: str, browser: str) -> Image.Image:
    """Return a screenshot of the page in light mode, cropped to what is not white."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        page.write_text(text, encoding="utf-8")
        options = [
            "--headless",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            "--blink-settings=preferredColorScheme=1",
            f"--window-size={WIDTH},{TALLEST}",
            f"--screenshot={shot}",
        ]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        image = Image.open(shot).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    return image.crop((0, 0, WIDTH, box[3] + EDGE)) if box else image


def main() -> None:
    """Write the image, by default next to this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="what `compressive report` wrote of two runs")
    parser.add_argument("--browser", default="chromium", help="Chromium or Chrome, to be started")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    given = parser.parse_args()
    image = photographed(composed(given.page.read_text(encoding="utf-8")), given.browser)
    image.save(given.out, optimize=True)


if __name__ == "__main__":
    main()
