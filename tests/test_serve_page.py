"""The page, in a real browser: teach two classes, ask, correct, undo, rename, forget, draw."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from browser import Browser
from drawings import drawings
from serving import SIZE, Client, drawn, serving

from vqprompt import Model

KNOWN = ["apple", "bicycle", "car", "house", "star"]


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Client:
    """The example's page on a smaller model."""
    images, names = drawings()
    path = tmp_path_factory.mktemp("page") / "drawings.vqp"
    model = Model(size=SIZE, device="cpu")
    model.learn([images[names.index(n), i] for n in KNOWN for i in range(8)], [n for n in KNOWN for _ in range(8)])
    model.save(path)
    with serving(path, example=True) as client:
        yield client


@pytest.fixture(scope="module")
def window() -> Browser:
    window = Browser()
    yield window
    window.close()


@pytest.fixture
def page(client, window) -> Browser:
    window.driver.get("about:blank")
    window.complaints()
    window.open(client.url)
    yield window
    assert window.complaints() == []


def names(client: Client) -> set[str]:
    return {c["name"] for c in client.about()["classes"]}


def teach(page: Browser, images: list[Path], name: str) -> None:
    page.tab("teach")
    page.drop("teach", images)
    page.write("#class-name", name)
    page.click("#look-through")
    page.wait(lambda: page.one("#findings"))


def test_teach_ask_correct_and_undo(page, client, tmp_path):
    # two classes, one of them with a broken image and a copy
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG nothing")
    cats = drawn(tmp_path, "cat", range(6))
    teach(page, [*cats, cats[0], broken], "cat")
    told = page.text("#findings")
    assert "2 images to look at" in told and "Cannot be read" in told and "An exact copy" in told
    assert len(page.all("#findings .finding img")) == 3, "each with a thumbnail, a copy with both"
    assert page.text("#teach") == "Teach 6 images"
    page.click("#teach")
    page.wait(lambda: "Learned 6 images of cat" in page.text("#taught"))
    assert "Accuracy before" in page.text("#taught") and "Accuracy now" in page.text("#taught")

    evil = "<img src=x onerror=alert(1)>"
    teach(page, drawn(tmp_path, "fish", range(6)), evil)
    page.click("#teach")
    page.wait(lambda: f"Learned 6 images of {evil}" in page.text("#taught"))
    assert names(client) == {*KNOWN, "cat", evil}

    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "cat", [0]))
    page.wait(lambda: page.text(".headline"))
    assert len(page.all("#view-ask .bars li")) == 5 and "%" in page.text("#view-ask .share")

    page.drop("ask", drawn(tmp_path, "umbrella", [0]))
    page.write("#view-ask .correct-name", "umbrella")
    page.button("Teach it", "#view-ask")
    page.wait(lambda: "Learned: this is umbrella." in page.text("#toasts"))
    assert "umbrella" in names(client)
    page.button("Undo", "#toasts")
    page.wait(lambda: "umbrella" not in names(client))

    page.tab("look")
    page.wait(lambda: len(page.all("#history li")) == 3)
    page.button("Undo back to before this (2 changes)", "#history")
    page.wait(lambda: names(client) == set(KNOWN))
    page.wait(lambda: len(page.all("#history li")) == 1)


def test_cancel_leaves_the_model_as_it_was(page, client, tmp_path):
    before = client.about()
    teach(page, drawn(tmp_path, "tree", range(100)), "tree")
    page.click("#teach")
    page.wait(lambda: page.all("#taught") or page.pressed("Cancel", "#view-teach .stage"))
    page.wait(lambda: "Cancelled. The model is as it was." in page.text("#toasts") or page.all("#taught"))
    if page.all("#taught"):  # it was faster than the click
        client.change("undo", steps=1)
    assert client.about()["classes"] == before["classes"]


def test_rename_forget_and_what_it_confuses(page, client):
    page.tab("look")
    page.click('tr[data-class="apple"] .rename')
    page.write("#new-name", "pear")
    page.button("Rename", "dialog")
    page.wait(lambda: page.all('tr[data-class="pear"]'))
    page.click('tr[data-class="car"] .forget')
    page.button("Forget", "dialog")
    page.wait(lambda: not page.all('tr[data-class="car"]'))
    assert names(client) == {"pear", "bicycle", "house", "star"}
    cells = page.wait(lambda: page.all(".matrix td button"))
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", cells[0])
    cells[0].click()
    page.wait(lambda: page.all(".cell-images img[src^=blob]"))
    client.change("undo", steps=2)


def test_the_guess_changes_while_one_draws(page):
    page.tab("draw")
    circle = [(0.5 + 0.3 * math.cos(a / 4), 0.5 + 0.3 * math.sin(a / 4)) for a in range(26)]
    page.draw([circle])
    first = page.wait(lambda: page.text("#view-draw .bars"))
    assert first.count("%") == 5
    page.draw([[(0.5, 0.1), (0.55, 0.2)], [(0.2, 0.9), (0.8, 0.9), (0.8, 0.1), (0.2, 0.1), (0.2, 0.9)]])
    page.wait(lambda: page.text("#view-draw .bars") != first)
    page.button("Clear", "#view-draw")
    assert page.text("#view-draw .bars") == ""


def test_the_camera_is_asked_several_times_per_second(page, client):
    page.tab("ask")
    before = _answered(client)
    page.button("Live camera")
    page.wait(lambda: page.text("#view-ask .headline"))
    page.wait(lambda: _answered(client) >= before + 3)
    page.button("Stop the camera")
    page.wait(lambda: not page.all("#view-ask video"))


def _answered(client: Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vqprompt_predictions_total"))


def test_it_can_be_used_with_the_keyboard_and_on_a_phone(page):
    from selenium.webdriver.common.keys import Keys

    page.one("#tab-draw").send_keys(Keys.ARROW_RIGHT)
    page.wait(lambda: page.one("#view-look").is_displayed())
    assert page.one("#tab-look").get_attribute("aria-selected") == "true"
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-look"
    unnamed = """return [...document.querySelectorAll("button, input:not([hidden]), select")]
        .filter((e) => e.offsetParent && !e.textContent.trim() && !e.getAttribute("aria-label") && !e.labels?.length)
        .map((e) => e.outerHTML)"""
    for name in ("teach", "ask", "draw", "look"):
        page.tab(name)
        assert page.driver.execute_script(unnamed) == [], "everything has a name for screen readers"
    try:
        page.resize(390, 800)
        for name in ("teach", "ask", "draw", "look"):
            page.tab(name)
            width = page.driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, f"{name} is wider than a phone"
    finally:
        page.resize(1100, 900)


def test_the_page_of_the_interface_needs_nothing_from_elsewhere(page, client):
    page.driver.get(f"{client.url}/docs")
    page.wait(lambda: len(page.all(".operation")) > 20)
    assert "/v2/models/{name}/infer" in page.text("main")
