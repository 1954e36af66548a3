"""The pictures of docs/serving.md and the recording in the README, taken from the real page in Chromium.

    python tools/serve_pictures.py

A model learns the example's drawings except umbrellas; two more things are taught on the page.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402
from drawings import drawings  # noqa: E402
from serving import Client, drawn, serving  # noqa: E402

from vqprompt import Model  # noqa: E402
from vqprompt.product import example  # noqa: E402
from vqprompt.product.model.pictures import content_id  # noqa: E402

OUT = ROOT / "docs" / "serving"
NEW = ("snail", "umbrella")
POINTER = """
const [kind, x, y] = arguments, canvas = document.getElementById("drawing"), box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent(kind, {
  clientX: box.left + x * box.width, clientY: box.top + y * box.height, pointerId: 1, bubbles: true, cancelable: true,
}));
"""


def circle(x: float, y: float, radius: float, points: int = 18) -> list[tuple[float, float]]:
    angles = [2 * math.pi * n / points for n in range(points + 1)]
    return [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]


BICYCLE = [
    circle(0.24, 0.66, 0.17), circle(0.76, 0.66, 0.17),
    [(0.24, 0.66), (0.38, 0.36), (0.66, 0.36), (0.47, 0.66), (0.24, 0.66)], [(0.47, 0.66), (0.38, 0.36)],
    [(0.76, 0.66), (0.66, 0.36), (0.64, 0.24), (0.74, 0.22)], [(0.30, 0.30), (0.44, 0.30)],
]  # fmt: skip


class Recording:
    """Frames of the page, each with the time that it is shown."""

    def __init__(self, page: Browser) -> None:
        self.page, self.frames, self.times = page, list[Image.Image](), list[int]()

    def take(self, milliseconds: int) -> None:
        frame = Image.open(io.BytesIO(self.page.driver.get_screenshot_as_png())).convert("RGB")
        self.frames.append(frame.resize((frame.width * 720 // frame.width, frame.height * 720 // frame.width)))
        self.times.append(milliseconds)

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        first.save(path, save_all=True, append_images=rest, duration=self.times, loop=0, quality=72, method=6)
        print(path, f"{path.stat().st_size / 1e6:.2f} MB, {len(self.frames)} frames")


def picture(page: Browser, name: str, whole: bool = False) -> None:
    """whole: all of the page, not just what fits into the window."""
    if whole:
        height = page.driver.execute_script("return document.documentElement.scrollHeight")
        page.resize(1000, min(height, 2400))
    time.sleep(0.4)
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    shot.quantize(128).save(OUT / f"{name}.png", optimize=True)
    page.driver.execute_script("document.getElementById('toasts').replaceChildren()")
    page.resize(1000, 720)


def sketch(page: Browser, strokes: list[list[tuple[float, float]]], recording: Recording | None = None) -> None:
    for stroke in strokes:
        page.driver.execute_script(POINTER, "pointerdown", *stroke[0])
        for number, point in enumerate(stroke[1:], start=1):
            page.driver.execute_script(POINTER, "pointermove", *point)
            if recording is not None and number % 3 == 0:
                recording.take(110)
        page.driver.execute_script(POINTER, "pointerup", *stroke[-1])
        if recording is not None:
            time.sleep(0.5)
            recording.take(350)


def tell(page: Browser, client: Client, folder: Path) -> None:
    recording = Recording(page)
    recording.take(900)
    sketch(page, BICYCLE, recording)
    time.sleep(1)
    recording.take(1800)
    picture(page, "draw")

    page.tab("teach")
    recording.take(500)
    images = drawn(folder, "umbrella", range(12))
    broken = folder / "holiday.png"
    broken.write_bytes(b"\x89PNG cut off")
    page.drop("teach", [*images, *drawn(folder, "snail", [70]), images[3], broken])
    time.sleep(0.5)
    recording.take(700)
    for end in range(2, 9, 2):
        page.write(".class-name", "umbrella"[:end])
        recording.take(150)
    picture(page, "teach", whole=True)
    page.click("#look-through")
    page.wait(lambda: page.one("#findings").is_displayed())
    time.sleep(0.5)
    recording.take(1500)
    page.click("#findings .cell.doubtful")
    page.driver.execute_script("document.querySelector('#findings .cell.doubtful').focus()")
    time.sleep(0.3)
    recording.take(1500)
    picture(page, "screening", whole=True)
    page.click("#teach")
    page.wait(lambda: page.one("#taught"))
    time.sleep(0.5)
    recording.take(2500)
    picture(page, "taught", whole=True)

    page.tab("ask")
    asked = drawn(folder, "umbrella", range(80, 100))
    page.drop("ask", [next(image for image in asked if client.predict(image)["name"] == "umbrella")])
    page.wait(lambda: page.text("#view-ask .headline"))
    time.sleep(0.6)
    recording.take(2200)
    picture(page, "ask")
    page.press(page.one("#attention"))
    page.wait(lambda: page.all(".shade"))
    time.sleep(0.4)
    recording.take(2000)
    picture(page, "attention", whole=True)
    page.press(page.one("#attention"))
    page.drop("ask", drawn(folder, "snail", [20]))
    time.sleep(1)
    page.write("#view-ask .correct-name", "snail")
    recording.take(1200)
    page.button("Teach it", "#view-ask")
    page.wait(lambda: "Learned: this is snail." in page.text("#toasts"))
    time.sleep(0.5)
    recording.take(1800)
    picture(page, "correct")

    page.tab("look")
    page.wait(lambda: page.all(".matrix td button"))
    time.sleep(0.5)
    recording.take(1500)
    page.driver.execute_script("document.getElementById('confusion').scrollIntoView()")
    page.click(".matrix .wrong")
    page.wait(lambda: page.all(".cell-images img[src^=blob]"))
    page.driver.execute_script("document.querySelector('.cell-images').scrollIntoView({block: 'end'})")
    time.sleep(0.5)
    recording.take(2500)
    page.resize(1000, 1150)
    page.driver.execute_script("document.getElementById('confusion').scrollIntoView()")
    picture(page, "confusion")
    page.driver.execute_script("location.hash = '#look/umbrella'")
    page.wait(lambda: page.all("#class .cell img[src^=blob]"))
    shown = client.get(f"/models/{client.model}/images", params={"label": "umbrella"}).json()["images"]
    snail = f"{content_id((folder / 'snail' / '70.png').read_bytes()):016x}"  # it was taught as an umbrella
    page.press(page.all("#class .cell")[shown.index(snail)])
    page.write("#relabel", "snail")
    recording.take(1200)
    page.click("#correct")
    page.wait(lambda: "Right answers" in page.text("#dialog"))
    time.sleep(0.4)
    recording.take(2000)
    picture(page, "class")
    page.button("Go on", "#dialog")
    page.wait(lambda: "Corrected" in page.text("#toasts"))
    page.driver.execute_script("location.hash = '#look'")
    page.wait(lambda: page.all("#history li") and page.all(".matrix"))
    page.driver.execute_script("document.getElementById('history').scrollIntoView({block: 'center'})")
    picture(page, "history")
    recording.save(ROOT / "docs" / "serve.webp")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    images, names = drawings()
    known = [n for n in example.THINGS if n not in NEW]
    rows = range(example.PER_CLASS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawings.vqp"
        model = Model(size=example.SIZE)
        model.learn([images[names.index(n), i] for n in known for i in rows], [n for n in known for _ in rows])
        model.save(path)
        with serving(path, example=True) as client:
            page = Browser(1000, 720)
            page.open(client.url)
            tell(page, client, Path(folder))
            page.close()
            client.change("undo", steps=client.about()["can_undo"] - 1)  # all that was taught on the page
            dark = Browser(1000, 720, dark=True)
            dark.open(client.url)
            sketch(dark, BICYCLE)
            time.sleep(1)
            picture(dark, "dark")
            dark.resize(390, 844, 2)
            for name in ("draw", "look", "teach"):
                dark.tab(name)
                time.sleep(0.6)
                shot = Image.open(io.BytesIO(dark.driver.get_screenshot_as_png())).convert("RGB")
                shot.quantize(128).save(OUT / f"phone-{name}.png", optimize=True)
            dark.close()


if __name__ == "__main__":
    main()
