"""Chromium, driven by Selenium, for tests of the page. Skips with a reason where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is tested with selenium: pip install selenium")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

SECONDS = 240  # at most; a machine may have a lot to do
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
DROP = """
const [zone, names, contents] = arguments;
const transfer = new DataTransfer();
names.forEach((name, n) => {
  const bytes = Uint8Array.from(atob(contents[n]), (c) => c.charCodeAt(0));
  transfer.items.add(new File([bytes], name, { type: name.endsWith(".txt") ? "text/plain" : "image/png" }));
});
zone.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
"""


def find_chromium() -> tuple[str, str]:
    browser = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with its driver here; on Debian: apt-get install chromium chromium-driver")
    return browser, driver


class Browser:
    """A page, and what a person does on it."""

    def __init__(self, width: int = 1100, height: int = 900, *, dark: bool = False, scale: float = 1) -> None:
        browser, driver = find_chromium()
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--ignore-certificate-errors",
            f"--window-size={width},{height}", f"--force-device-scale-factor={scale}", *CAMERA,
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        self.resize(width, height, scale)
        self.set_theme(dark)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def set_theme(self, dark: bool) -> None:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme, still]})

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait(lambda: "ready" in self.one("body").get_attribute("class"))

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, condition: Callable[[], Any]) -> Any:
        def tried(_: Any) -> Any:
            from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

            try:
                return condition()
            except (NoSuchElementException, StaleElementReferenceException):
                return False

        return WebDriverWait(self.driver, SECONDS, poll_frequency=0.05).until(tried)

    def click(self, selector: str) -> None:
        def clicked() -> bool:
            element = self.one(selector)
            return element.is_enabled() and element.is_displayed() and self.press(element)

        self.wait(clicked)

    def press(self, element: Any) -> bool:
        """In one step. The driver's own click takes several, and misses an element that the page moves or exchanges."""
        self.driver.execute_script("arguments[0].click()", element)
        return True

    def button(self, text: str, within: str = "body") -> None:
        """Press the button that says so, when it is there."""
        self.wait(lambda: self.pressed(text, within))

    def pressed(self, text: str, within: str = "body") -> bool:
        """Press the button that says so, if it is there. Inside of `wait`: the page may exchange it at any moment."""
        place = f".//*[self::button][normalize-space()={text!r}]"
        shown = [b for b in self.one(within).find_elements(By.XPATH, place) if b.is_displayed()]
        return bool(shown) and self.press(shown[0])

    def write(self, selector: str, text: str) -> None:
        element = self.wait(lambda: next((e for e in self.all(selector) if e.is_displayed()), None))
        if element.tag_name != "select":
            element.clear()
        element.send_keys(text)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def drop(self, view: str, images: list[Path]) -> None:
        import base64

        contents = [base64.b64encode(image.read_bytes()).decode() for image in images]
        self.driver.execute_script(DROP, self.one(f"#view-{view} .dropzone"), [i.name for i in images], contents)

    def tab(self, name: str) -> None:
        self.click(f"#tab-{name}")
        self.wait(lambda: self.one(f"#view-{name}").is_displayed())

    def draw(self, strokes: list[list[tuple[float, float]]]) -> None:
        """Strokes in parts of the canvas, from 0 to 1."""
        from selenium.webdriver.common.action_chains import ActionChains

        canvas = self.one("#drawing")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        width, height = canvas.size["width"], canvas.size["height"]
        for stroke in strokes:
            places = [(int((x - 0.5) * width), int((y - 0.5) * height)) for x, y in stroke]
            actions = (
                ActionChains(self.driver, duration=15).move_to_element_with_offset(canvas, *places[0]).click_and_hold()
            )
            for (x, y), (a, b) in zip(places[1:], places[:-1], strict=True):
                actions.move_by_offset(x - a, y - b)
            actions.release().perform()

    def complaints(self) -> list[str]:
        """Errors in the browser's console: of scripts, and of the Content-Security-Policy."""
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def close(self) -> None:
        self.driver.quit()
