"""Makes the picture of the page: python docs/site/picture.py [TARGET].

It trains what the quickstart trains, with its mistake, opens the run by
`quark ui` in a headless Chromium, and keeps what is seen as docs/assets/page.png, of few colours.
It needs PyTorch, Pillow, playwright and a Chromium (QUARK_CHROMIUM, or one on the PATH).
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parent
TUTORIAL = SITE.parent / "get-started" / "quickstart.md"
TARGET = SITE.parent / "assets" / "page.png"
SIZE = {"width": 1120, "height": 760}
SETTLED_MS = 12_000  # until the page has analyzed the run and drawn its curves
COLOURS = 128
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def train(folder):
    """Runs the tutorial's program, and its mistake."""
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text("utf-8"), re.DOTALL | re.M)
    (folder / "train.py").write_text("\n".join(blocks), "utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)


@contextlib.contextmanager
def serve(folder):
    """The address of a page over the runs of a folder."""
    said = []
    command = [sys.executable, "-m", "quark", "ui", "--no-open", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            for line in server.stdout:
                said.append(line)
                if found := re.search(r"http://\S+", line):
                    yield found[0]
                    return
            raise RuntimeError("".join(said))
        finally:
            server.terminate()


def look(address, target):
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("QUARK_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        page.get_by_text("second try").first.click()
        page.wait_for_timeout(SETTLED_MS)
        page.screenshot(path=target)
        browser.close()


def shrink(target):
    from PIL import Image

    with Image.open(target) as image:
        image.convert("RGB").quantize(COLOURS).save(target, optimize=True)


def main():
    target = Path(sys.argv[1] if len(sys.argv) > 1 else TARGET).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder)
        with serve(folder) as address:
            look(address, target)
    shrink(target)
    print(f"{target}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
