"""The report in a real browser: all sections visible, no clipped or overlapping text."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from report_pages import SECTIONS, write_run
from run_files import record
from safetensors.numpy import load_file, save_file

from compressive.reporting import write_report
from compressive.rundir.records import ComparisonText

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = [os.environ.get("CHROMIUM"), *(shutil.which(name) for name in NAMES)]
CHROMIUM = next(filter(None, FOUND), None)
WIDTHS = (1280, 390)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason=f"none of {', '.join(NAMES)} on PATH, and CHROMIUM is not set"
    ),
]

# Appended to a copy of the page. A box is the visible part of a line of text after clipping by its
# ancestors. Text in drawings is measured by element, which accounts for rotation.
MEASURE = """
<script>
addEventListener("load", () => {
  const clips = (style) => style.overflowX !== "visible" || style.overflowY !== "visible";
  const boxes = [], cut = [];
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const node = words.currentNode, parent = node.parentElement, text = node.data.trim();
    if (!text || parent.closest("script, style, title") || !parent.checkVisibility()) continue;
    const drawing = parent.closest("svg"), range = document.createRange();
    range.selectNodeContents(node);
    const rects = drawing ? [parent.getBoundingClientRect()] : range.getClientRects();
    for (const rect of rects) {
      let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
      for (let up = parent; up && up !== document.body; up = up.parentElement) {
        if (!clips(getComputedStyle(up)) || up === drawing) continue;
        const edge = up.getBoundingClientRect();
        left = Math.max(left, edge.left); right = Math.min(right, edge.right);
        top = Math.max(top, edge.top); bottom = Math.min(bottom, edge.bottom);
      }
      if (right - left > 1 && bottom - top > 1) boxes.push({ text, left, top, right, bottom });
    }
    if (!drawing) continue;
    const word = rects[0], card = (parent.closest("figure") || drawing).getBoundingClientRect();
    if (word.left < card.left - 1 || word.right > card.right + 1
        || word.top < card.top - 1 || word.bottom > card.bottom + 1) cut.push(text);
  }
  for (const element of document.body.querySelectorAll("*")) {
    const style = getComputedStyle(element), hidden = /hidden|clip/;
    if ((hidden.test(style.overflowX) && element.scrollWidth > element.clientWidth + 1)
        || (hidden.test(style.overflowY) && element.scrollHeight > element.clientHeight + 1))
      cut.push(element.textContent.trim());
  }
  boxes.sort((a, b) => a.top - b.top);
  const covered = [];
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - 2; j++) {
      const b = boxes[j];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
          && Math.min(a.bottom, b.bottom) - b.top > 2) covered.push([a.text, b.text]);
    }
  });
  const sections = [...document.querySelectorAll("section")].map((section) => {
    const head = section.querySelector("h2, h3"), rect = head && head.getBoundingClientRect();
    const seen = head && head.checkVisibility() && rect.width > 0 && rect.height > 0;
    return [section.id, seen ? head.textContent.trim() : ""];
  });
  parent.postMessage({
    width: innerWidth, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    ground: getComputedStyle(document.body).backgroundColor, sections, cut, covered,
    texts: boxes.length, over: document.documentElement.scrollWidth - innerWidth,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
  }, "*");
});
</script>
"""
# A window cannot be as narrow as a phone, but a frame inside it can.
FRAMES = """<!doctype html><pre></pre>
<script>
const found = [];
addEventListener("message", (event) => {
  found.push(event.data);
  document.querySelector("pre").textContent = encodeURIComponent(JSON.stringify(found));
});
</script>
"""


def render(page: str, folder: Path, *, dark: bool = False) -> list[dict[str, Any]]:
    """Return the browser's layout measurements at each width, widest first."""
    folder.mkdir()
    (folder / "page.html").write_text(page + MEASURE, encoding="utf-8")
    frame = '<iframe src="page.html" style="width: {}px; height: 900px; border: 0"></iframe>\n'
    (folder / "frames.html").write_text(FRAMES + "".join(map(frame.format, WIDTHS)))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
            "--host-resolver-rules=MAP * ~NOTFOUND",  # requests are not sent
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom"),
            (folder / "frames.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    match = re.search(r"<pre>(.+?)</pre>", done.stdout)
    assert match, done.stderr[-2000:]
    found = json.loads(unquote(match[1]))
    found.sort(key=lambda one: -one["width"])
    assert [one["width"] for one in found] == list(WIDTHS)
    return found


def network_requests(found: dict[str, Any]) -> list[str]:
    """Return the network addresses that the page requested."""
    return [address for address in found["requests"] if not address.startswith(("file:", "data:"))]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a report with every section, long names and overlapping classes on the map."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / f"beta{i / 100}-seed0", i / 100) for i in range(3)]
    runs.append(write_run(folder / "beta1-and-a-name-that-goes-on-for-a-while-seed0", 1.0))
    names = ["automobile", "grandfather clock", "vitruvian_man_of_leonardo"]
    for run in runs[:3]:
        path = run / "evaluation/gallery.safetensors"
        arrays = load_file(path)
        arrays["map"] = np.random.default_rng(0).normal(size=(600, 2)).astype(np.float32)
        arrays["map_label"] = np.arange(600) % 3
        save_file(arrays, path, metadata={"classes": json.dumps(names), "map_method": "noise"})
        results = run / "evaluation/results.json"
        content = json.loads(results.read_text())
        shift = content["records"][0]["value"] - 0.7
        content["records"] += [
            record("corruptions", "set-C", "top-1", 0.4 - shift),
            record("information", "set", "reducible_residual", 1 - 20 * shift),
            record("information", "set", "residual", 189.93 - 20 * shift, low=189.9, high=190.0),
        ]
        results.write_text(json.dumps(content))
    shutil.rmtree(runs[3] / "evaluation")
    (runs[3] / "encoder.safetensors").unlink()
    with (runs[3] / "metrics.jsonl").open("a") as file:
        note = "collapse: directions spread 0.08 of uniform, rank 4.2 of 256; lower bottleneck.beta"
        file.write(
            json.dumps({"step": 31, "loss": 1e4, "reducible_residual": 90.0, "health": note}) + "\n"
        )
    line = ("smoothness saturation+, train", "0.350", "0.305", "-0.046 [-0.059, -0.033]", "better")
    verdicts = ComparisonText("beta0.0-seed0", "beta0.01-seed0", [line, line], "on set")
    path = write_report(runs, folder / "report.html", verdicts=verdicts)
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_renders_without_clipping_overlap_or_requests(
    page: str, tmp_path: Path, dark: bool
) -> None:
    for found in render(page, tmp_path / "browser", dark=dark):
        sections = [section for section, _ in found["sections"]]
        assert sections.pop(sections.index("figures") - 1) == "verdicts"
        assert sections == SECTIONS
        assert all(heading for name, heading in found["sections"] if name != "summary")
        assert found["texts"] > 500
        assert found["over"] <= 0
        assert found["cut"] == []
        assert found["covered"] == []
        assert network_requests(found) == []
        assert found["dark"] == dark
        light = sum(int(part) for part in re.findall(r"\d+", found["ground"])) / 3
        assert (light < 60) if dark else (light > 200)


@pytest.mark.slow
def test_layout_check_detects_defects(tmp_path: Path) -> None:
    page = """<!doctype html><meta name="viewport" content="width=device-width">
<section id="a"><h2 style="display: none">hidden</h2></section>
<section id="b"><h2>seen</h2></section>
<p>one line<span style="position: relative; left: -40px">over another</span></p>
<p style="width: 60px; overflow: hidden; white-space: nowrap">a text that is cut off</p>
<p style="width: 60px; overflow: auto; white-space: nowrap">a text that can be scrolled</p>
<svg viewBox="0 0 99 30" width="99"><text x="5" y="20">abc</text><text x="9" y="20">def</text>
<text x="70" y="20">beyond the drawing</text></svg>
<div style="width: 800px">wide</div>
<img src="http://example.invalid/picture.png" alt="">"""
    wide, narrow = render(page, tmp_path / "browser")
    for found in (wide, narrow):
        assert network_requests(found) == ["http://example.invalid/picture.png"]
        assert found["sections"] == [["a", ""], ["b", "seen"]]
        assert found["cut"] == ["beyond the drawing", "a text that is cut off"]
        pairs = {frozenset(pair) for pair in found["covered"]}
        assert {frozenset(("one line", "over another")), frozenset(("abc", "def"))} <= pairs
    assert wide["over"] <= 0
    assert narrow["over"] > 400
