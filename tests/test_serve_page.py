"""The page, in a real browser: teach, review, ask, correct, undo, draw; in two tabs, on a phone, with the keyboard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from drawings import drawings
from hand_drawn import hand_drawings
from selenium.webdriver.common.keys import Keys
from serving import SIZE, Client, drawn, serving

from vqprompt import Model
from vqprompt.product import example
from vqprompt.product.serve import server

KNOWN = ["apple", "bicycle", "car", "house", "star"]
TABS = ("teach", "ask", "draw", "look")


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    """The example's page on a smaller model."""
    images, names = drawings()
    path = tmp_path_factory.mktemp("page") / "drawings.vqp"
    model = Model(size=SIZE, device="cpu")
    model.learn([images[names.index(n), i] for n in KNOWN for i in range(8)], [n for n in KNOWN for _ in range(8)])
    model.save(path)
    with serving(path, example=True) as client:
        yield client


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    window = Browser()
    yield window
    window.close()


@pytest.fixture
def page(client, window) -> Iterator[Browser]:
    yield from fresh(window, client)
    for upload in client.get(f"/models/{client.model}/state").json()["uploads"]:
        client.session.delete(f"{client.url}/models/{client.model}/uploads/{upload['upload']}")
    if undoable := len(client.about()["history"]) - 1:
        client.change("undo", steps=undoable)


@pytest.fixture
def empty(window, tmp_path) -> Iterator[tuple[Browser, Client]]:
    """The page of a model that knows nothing."""
    with serving(tmp_path / "m.vqp") as client:
        for page in fresh(window, client):
            yield page, client


def fresh(window: Browser, client: Client) -> Iterator[Browser]:
    window.driver.get("about:blank")
    window.resize(1100, 900)
    window.complaints()
    window.open(client.url)
    yield window
    assert window.complaints() == []


def names(client: Client) -> set[str]:
    return {c["name"] for c in client.about()["classes"]}


def check(page: Browser, images: list[Path], name: str) -> None:
    page.tab("teach")
    page.drop("teach", images)
    page.write(".class-name", name)
    page.click("#look-through")
    page.wait(lambda: page.one("#findings").is_displayed())


def teach(page: Browser, images: list[Path], name: str) -> None:
    check(page, images, name)
    page.click("#teach")
    page.wait(lambda: f"of {name}" in page.text("#taught"))


def really_click(page: Browser, selector: str) -> None:
    """As a person does: fails if something else is in front of it."""
    page.one(selector).click()


def test_teach_ask_correct_and_undo(page, client, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG nothing")
    cats = drawn(tmp_path, "cat", range(6))
    check(page, [*cats, cats[0], broken], "cat")
    told = page.text("#findings")
    assert "2 images to look at" in told and "cannot be read" in told and "an exact copy" in told
    assert page.text("#teach") == "Teach 6 images", "copies and what cannot be read are left out"
    assert "Quick about" in told and told.count("needs at least two classes") == 2, "a time or a reason"
    page.click("#preview")
    page.wait(lambda: "left out would get another answer" in page.text("#findings"))
    assert names(client) == set(KNOWN), "only a preview"
    page.click("#teach")
    page.wait(lambda: "Learned 6 images of cat" in page.text("#taught"))
    assert "Right answers before" in page.text("#taught") and "Right answers now" in page.text("#taught")

    evil = "<img src=x onerror=alert(1)>"
    teach(page, drawn(tmp_path, "fish", range(6)), evil)
    assert names(client) == {*KNOWN, "cat", evil}

    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "cat", [0]))
    page.wait(lambda: "cat" in page.text("#view-ask .answers"))
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


def test_messages_never_cover_what_one_wants_to_click(page, tmp_path):
    page.resize(1280, 900)
    text = tmp_path / "notes.txt"
    text.write_text("no image")
    page.tab("teach")
    page.drop("teach", [*drawn(tmp_path, "cat", range(13)), text])
    page.write(".class-name", "Dog")
    page.wait(lambda: "left out: not images" in page.text("#toasts"))
    for selector in (".class-name", "#look-through"):
        really_click(page, selector)
    page.wait(lambda: page.one("#findings").is_displayed())


def test_two_tabs_and_a_reload_show_the_same(page, client, tmp_path):
    check(page, drawn(tmp_path, "cat", range(8)), "cat")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        page.open(client.url + "/#teach")
        page.wait(lambda: page.one("#findings").is_displayed())
        page.wait(lambda: len(page.all("#findings .cell img[src^=blob]")) == 8)
        page.all("#findings .cell")[0].click()
        page.click("#leave-out")
        page.wait(lambda: page.text("#teach") == "Teach 7 images")
        page.driver.switch_to.window(first)
        page.wait(lambda: page.text("#teach") == "Teach 7 images")
        page.driver.refresh()
        page.wait(lambda: page.text("#teach") == "Teach 7 images")
        page.click("#teach")
        page.wait(lambda: "Learned 7 images of cat" in page.text("#taught"))
        page.wait(lambda: "6 classes" in page.text("#summary"))
        page.driver.switch_to.window(page.driver.window_handles[1])
        page.wait(lambda: "Learned 7 images of cat" in page.text("#taught"))
        page.wait(lambda: "6 classes" in page.text("#summary"))
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)


def test_a_job_can_be_cancelled_from_a_page_that_did_not_start_it(page, client, tmp_path):
    before = client.about()
    files = [("files", (f"{p.name}", p.read_bytes())) for p in drawn(tmp_path, "tree", range(100))]
    job = client.post(f"/models/{client.model}/teach", files=files, data={"label": "tree"}).json()
    page.wait(lambda: page.pressed("Cancel", "#jobs") or client.get(f"/jobs/{job['id']}").json()["state"] == "done")
    state = client.wait(client.post(f"/jobs/{job['id']}/cancel"))["state"]
    page.wait(lambda: page.text("#jobs") == "")
    if state == "cancelled":  # else it was faster than the click
        assert client.about()["classes"] == before["classes"]


def test_back_changes_tabs_and_addresses_name_classes(page, client):
    page.driver.get(client.url + "/#look")
    page.wait(lambda: page.one("#view-look").is_displayed())
    page.tab("ask")
    page.driver.back()
    page.wait(lambda: page.one("#view-look").is_displayed())
    page.press(page.wait(lambda: page.one('tr[data-class="apple"] a')))
    page.wait(lambda: page.text("#class h1") == "apple")
    assert page.driver.current_url.endswith("#look/apple")
    page.driver.refresh()
    page.wait(lambda: page.text("#class h1") == "apple")
    page.driver.back()
    page.wait(lambda: page.one("#confusion"))


def test_with_several_models_the_address_names_the_model(window, tmp_path):
    images, names = drawings()
    for file, things in (("one", KNOWN[:2]), ("two", KNOWN[2:])):
        model = Model(size=SIZE, device="cpu")
        model.learn(
            [images[names.index(n), i] for n in things for i in range(4)], [n for n in things for _ in range(4)]
        )
        model.save(tmp_path / f"{file}.vqp")
    with serving(tmp_path) as client:
        window.open(client.url + "/#/two/look")
        window.wait(lambda: window.text("#view-look h1") == "two")
        window.write("#model", "one")
        window.wait(lambda: window.text("#view-look h1") == "one")
        assert window.driver.current_url.endswith("#/one/look")
        window.driver.back()
        window.wait(lambda: window.text("#view-look h1") == "two" and window.text("#summary").startswith("3 classes"))


def test_images_are_reviewed_with_the_keyboard(page, client, tmp_path):
    check(page, [*drawn(tmp_path, "cat", range(5)), *drawn(tmp_path, "tree", [60, 61])], "cat")
    page.driver.execute_script("document.getElementById('order').value = 'class'")
    cells = page.all("#findings .cell")
    cells[0].send_keys(Keys.END)
    cells[0].send_keys(Keys.ARROW_RIGHT, Keys.SPACE)
    page.driver.switch_to.active_element.send_keys("m")
    assert page.driver.switch_to.active_element.get_attribute("id") == "move-to"
    moved = page.all("#findings .cell[aria-pressed=true]")
    assert len(moved) == 1
    page.write("#move-to", "tree")
    page.one("#move-to").send_keys(Keys.ENTER)
    page.wait(lambda: sum("tree" in c.text for c in page.all("#findings .cell")) == 1)
    page.all("#findings .cell")[0].send_keys(Keys.CONTROL, "a")
    assert len(page.all("#findings .cell[aria-pressed=true]")) == 7
    page.driver.switch_to.active_element.send_keys(Keys.DELETE)
    page.wait(lambda: page.text("#teach") == "No image is left")
    (upload,) = client.get(f"/models/{client.model}/state").json()["uploads"]
    decided = client.get(f"/models/{client.model}/uploads/{upload['upload']}").json()["images"]
    assert [i["label"] for i in decided].count("tree") == 1 and all(i["left_out"] for i in decided)


def test_a_folder_of_folders_becomes_named_classes_side_by_side(page, client, tmp_path):
    folder = tmp_path / "plants"
    for name in ("cat", "tree"):
        drawn(folder, name, range(5))
    page.tab("teach")
    page.one("#view-teach input[webkitdirectory]").send_keys(str(folder))
    page.wait(lambda: len(page.all(".bucket")) == 2)
    assert [e.get_attribute("value") for e in page.all(".class-name")] == ["cat", "tree"]
    assert [e.text for e in page.all(".bucket-count")] == ["5 images", "5 images"]
    page.click("#look-through")
    page.wait(lambda: page.one("#findings").is_displayed())
    assert page.text("#findings .efforts").count("about") == 3, "a time for every choice"
    page.click("#teach")
    page.wait(lambda: "Learned 10 images of cat, tree" in page.text("#taught"))


def test_classes_and_their_images_are_corrected(page, client, tmp_path):
    client.teach(drawn(tmp_path, "cat", range(6)), "cat")
    client.teach(drawn(tmp_path, "tree", range(6)), "dog")
    page.driver.get(client.url + "/#look/dog")
    page.wait(lambda: len(page.all("#class .cell")) == 6)
    page.all("#class .cell")[0].click()
    page.write("#relabel", "dog")
    page.click("#correct")
    page.wait(lambda: "nothing to do" in page.text("#toasts"))
    page.write("#relabel", "cat")
    page.click("#correct")
    page.wait(lambda: "left out would get another answer" in page.text("#dialog"))
    assert "Right answers" in page.text("#dialog")
    page.button("Go on", "#dialog")
    page.wait(lambda: len(page.all("#class .cell")) == 5)
    assert {c["name"]: c["images"] for c in client.about()["classes"]}["cat"] == 7
    page.all("#class .cell")[0].click()
    page.click("#unlearn")
    page.button("Go on", "#dialog")
    page.wait(lambda: len(page.all("#class .cell")) == 4)
    page.all("#class .cell")[0].click()
    page.button("None of these", "#class")
    page.button("Go on", "#dialog")
    page.wait(lambda: client.about()["counterexamples"] == 1)
    page.click("#class .merge")
    page.write("#merge-with", "cat")
    page.button("Go on", "#dialog")
    page.wait(lambda: "Right answers" in page.text("#dialog"))
    page.button("Go on", "#dialog")
    page.wait(lambda: "cat" not in names(client))
    page.driver.get(client.url + "/#look")
    page.wait(lambda: len(page.all("#history li")) == 7)
    assert "taught as none of these" in page.text("#view-look")


def test_rename_forget_and_what_it_mixes_up(page, client):
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


def test_an_image_that_was_taught_wrong_moves_to_the_class_that_a_person_names(page, client, tmp_path):
    cats, trees = drawn(tmp_path, "cat", range(4)), drawn(tmp_path, "tree", range(4))
    client.teach([*cats, trees[0]], "cat")
    client.teach(trees[1:], "tree")
    page.tab("ask")
    page.drop("ask", [trees[0]])
    page.write("#view-ask .correct-name", "tree")
    page.button("Teach it", "#view-ask")
    page.wait(lambda: "Learned: this is tree." in page.text("#toasts"))
    assert {c["name"]: c["images"] for c in client.about()["classes"]}.items() >= {"cat": 4, "tree": 4}.items()
    page.button("Undo", "#toasts")
    page.wait(lambda: {c["name"]: c["images"] for c in client.about()["classes"]}["cat"] == 5)


def test_one_click_that_takes_answers_away_says_so_and_undoes_nothing_else(page, client, tmp_path):
    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "apple", [9]))
    page.write("#view-ask .correct-name", "fruit")
    page.button("Teach it", "#view-ask")
    page.wait(lambda: "fruit takes 3 of 8 left-out images of apple" in page.text("#toasts"))
    assert "Undo" in page.text("#toasts")
    version = client.about()["version"]
    client.change("rename", old="car", new="auto")  # somebody else
    page.wait(lambda: "Undo" not in page.text("#toasts"))
    late = client.change("undo", version=version)
    assert late["state"] == "failed" and "the model has changed" in late["error"] and "auto" in names(client)


def test_an_image_can_be_none_of_these(page, client, tmp_path):
    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "spider", [0]))
    page.wait(lambda: page.one("#view-ask .none").is_displayed())
    page.click("#view-ask .none")
    page.wait(lambda: client.about()["counterexamples"] == 1)
    page.wait(lambda: page.text("#view-ask .headline").startswith("Unknown"))
    assert page.all("#view-ask .bars li") == [], "no shares for what it does not know"


def test_a_file_that_is_no_image_gets_a_reason_and_nothing_to_correct(page, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG nothing")
    page.tab("ask")
    page.drop("ask", [broken])
    page.wait(lambda: "replace the file" in page.text("#view-ask .headline"))
    assert not page.one("#view-ask .correction").is_displayed() and page.all("#view-ask .bars li") == []
    page.wait(lambda: "not an image that can be shown" in page.text("#view-ask .preview"))
    page.driver.get_log("browser")  # Chromium reports the status 415


def test_where_it_looks_is_shown_on_the_image(page, client, tmp_path, monkeypatch):
    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "star", [3]))
    page.wait(lambda: page.one("#attention").is_displayed())
    page.press(page.one("#attention"))
    page.wait(lambda: page.text("#view-ask .hint[role=status]") == "Bright is what it looks at most.")
    place = "const {x, y, width, height} = document.querySelector(arguments[0]).getBoundingClientRect();"
    shade, image = (
        page.driver.execute_script(f"{place} return [x, y, width, height]", f".picture {what}")
        for what in (".shade", "img")
    )
    assert shade == image, "it covers the image exactly"
    alphas = page.driver.execute_script("""
      const shade = document.querySelector(".shade");
      const points = shade.getContext("2d").getImageData(0, 0, shade.width, shade.height).data;
      return [...points].filter((_, n) => n % 4 === 3);
    """)
    assert min(alphas) < 30 and max(alphas) > 60, "bright in one place, dark in another"
    page.drop("ask", drawn(tmp_path, "apple", [3]))
    page.wait(lambda: page.text("#view-ask .headline").startswith("apple") and page.all(".shade"))
    page.press(page.one("#attention"))
    page.wait(lambda: not page.all(".shade"))

    monkeypatch.setattr("vqprompt.product.serve.api_models.find_spec", lambda name: None)  # without PyTorch
    page.driver.refresh()
    page.wait(lambda: "ready" in page.one("body").get_attribute("class"))
    page.drop("ask", drawn(tmp_path, "star", [3]))
    page.wait(lambda: page.one("#view-ask .correction").is_displayed())
    assert not page.one("#attention").is_displayed()


def test_an_empty_model_teaches_how_to_begin(empty, tmp_path):
    page, client = empty
    assert page.text("#summary") == "knows nothing yet" and len(page.all(".bucket")) == 2
    assert "Give it two classes" in page.text("#view-teach")
    page.tab("ask")
    assert "nothing to ask" in page.text("#view-ask") and not page.one("#view-ask .dropzone").is_displayed()
    page.tab("look")
    assert "When it has learned" in page.text("#view-look") and page.all("#view-look table") == []
    assert not any(word in page.text("#view-look") for word in ("Download", "ONNX", "card"))
    for name in ("apple", "star"):
        client.teach(drawn(tmp_path, name, range(3)), name)
    page.wait(lambda: page.all("#confusion h2"))
    assert "null" not in page.text("#view-look") and "undefined" not in page.text("#view-look")


def test_a_wrong_token_is_called_wrong(window, tmp_path):
    with serving(tmp_path / "m.vqp", token="a secret of some length") as client:
        window.driver.get(client.url)
        window.driver.execute_script("sessionStorage.clear()")
        window.driver.get(client.url + "/?again")
        window.wait(lambda: "needs a token" in window.text("#dialog"))
        check_accessible(window, "token", "#dialog")
        assert "wrong" not in window.text("#dialog")
        window.write("#dialog input", "a guess")
        window.button("Continue", "#dialog")
        window.wait(lambda: "This token is wrong" in window.text("#dialog"))
        window.write("#dialog input", "a secret of some length")
        window.button("Continue", "#dialog")
        window.wait(lambda: window.text("#summary") == "knows nothing yet")
        window.complaints()  # Chromium reports the status 401


def test_the_guess_changes_while_one_draws(page):
    page.tab("draw")
    circle = [(0.5 + 0.3 * math.cos(a / 4), 0.5 + 0.3 * math.sin(a / 4)) for a in range(26)]
    page.draw([circle])
    first = page.wait(lambda: page.text("#view-draw .answers"))
    page.draw([[(0.5, 0.1), (0.55, 0.2)], [(0.2, 0.9), (0.8, 0.9), (0.8, 0.1), (0.2, 0.1), (0.2, 0.9)]])
    page.wait(lambda: page.text("#view-draw .answers") != first)
    page.button("Clear", "#view-draw")
    assert page.text("#view-draw .answers") == ""


@pytest.mark.slow
def test_the_example_recognizes_what_people_draw_with_a_mouse(window, tmp_path):
    """And says so in its header: at least 80 %."""
    path = tmp_path / "drawings.vqp"
    example.make_example(path, device="cpu")
    asked = """const [strokes, done] = arguments; (async () => {
      const { small } = await import("/static/draw.js"), { ask } = await import("/static/ask.js");
      done((await ask(await small(strokes.map((s) => s.map(([x, y]) => [448 * x, 448 * y]))))).name);
    })()"""
    with serving(path, example=True) as client:
        window.open(client.url)
        shown = window.text("#summary")
        assert shown.startswith("20 classes") and int(shown.split("· ")[1].split()[0]) >= 80
        for size, at in ((1, 0), (0.5, 0.45)):  # over the whole canvas, and small in a corner
            drawn_things = [(name, [[[at + size * z for z in point] for point in s] for s in d])
                            for name, d in hand_drawings()]  # fmt: skip
            answers = [(name, window.driver.execute_async_script(asked, strokes)) for name, strokes in drawn_things]
            wrong = [f"{name}: {answer}" for name, answer in answers if name != answer]
            print(f"{len(answers) - len(wrong)} of {len(answers)} recognized; not: {', '.join(wrong)}")
            assert len(answers) >= 20 and len(wrong) <= 0.2 * len(answers), wrong


def test_the_camera_records_while_a_button_is_held(page, client):
    from selenium.webdriver.common.action_chains import ActionChains

    page.tab("teach")
    page.driver.execute_script("""
        const play = HTMLMediaElement.prototype.play;  // of a camera that is slow to start
        HTMLMediaElement.prototype.play = async function () {
          document.querySelector("#add-class").click();
          await new Promise((started) => setTimeout(started, 300));
          return play.call(this);
        };
        window.places = new Set();
        const look = () => {
          const button = document.querySelector(".record");
          if (button) places.add(Math.round(button.getBoundingClientRect().top + scrollY));
          if (places.size < 9) requestAnimationFrame(look);
        };
        look();
    """)
    page.button("Use the camera")
    page.wait(lambda: len(page.all(".record")) == 2)
    page.wait(lambda: page.driver.execute_script("return places.size && document.querySelector('video').videoWidth"))
    assert len(page.driver.execute_script("return [...places]")) == 1, "the picture is there before the buttons"
    for number, least in ((0, 3), (1, 2)):
        button = page.all(".record")[number]
        page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        ActionChains(page.driver).click_and_hold(button).perform()
        page.wait(lambda n=number, m=least: len(page.all(".bucket")[n].find_elements("css selector", "li img")) >= m)
        ActionChains(page.driver).release().perform()
    page.wait(lambda: all(b.text == "Hold to record" for b in page.all(".record")))
    recorded = len(page.all(".bucket li img"))
    page.press(page.all(".bucket li .close")[0])
    page.wait(lambda: len(page.all(".bucket li img")) == recorded - 1), "frames can be taken out"


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


def test_a_phone_gets_an_address_with_https_and_a_code(window, tmp_path, monkeypatch):
    monkeypatch.setenv("VQPROMPT_HOME", str(tmp_path / "cache"))
    with serving(tmp_path / "m.vqp", lan=True) as client:
        assert client.url.startswith("https://") and "#token=" in client.url
        window.open(client.url)
        assert window.driver.execute_script("return window.isSecureContext"), "so that the camera works"
        window.click("#phone")
        window.wait(lambda: window.text("#dialog .address") == client.url)
        assert window.one("#dialog .code").get_attribute("src").startswith("data:image/svg+xml")
        check_accessible(window, "code to scan", "#dialog")
        assert "Whoever has this address" in window.text("#dialog")
        window.button("Done", "#dialog")
        window.complaints()


def test_without_https_the_camera_is_not_offered(page, client):
    source = "Object.defineProperty(window, 'isSecureContext', {value: false})"
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    page.driver.refresh()
    page.wait(lambda: "ready" in page.one("body").get_attribute("class"))
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    page.tab("ask")
    assert "The camera needs a secure address" in page.text("#view-ask") and "Live camera" not in page.text("#view-ask")


def check_accessible(page: Browser, view: str, within: str = "html") -> None:
    """axe-core finds nothing serious, light and dark, narrow and wide, and nothing is wider than the window."""
    import axe_core_python

    axe = (Path(axe_core_python.__path__[0]) / "axe.min.js").read_text(encoding="utf-8")
    run = """const [within, done] = arguments;
      axe.run(within, {resultTypes: ["violations"]}).then((r) => done(r.violations
        .filter((v) => ["serious", "critical"].includes(v.impact))
        .map((v) => `${v.id}: ${v.nodes.slice(0, 3).map((n) => n.html + n.failureSummary).join(" | ")}`)));"""
    page.driver.execute_script(axe)
    for width, dark in ((390, False), (390, True), (1280, True), (1280, False)):
        page.resize(width, 900)
        page.set_theme(dark)
        assert page.driver.execute_async_script(run, within) == [], (view, width, dark)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width, (view, width)


def test_everybody_can_use_every_view_and_every_dialog(page, client, tmp_path):
    def go(address: str) -> None:
        page.driver.execute_script("location.hash = arguments[0]", address)
        page.wait(lambda: page.one(f"#view-{address.partition('/')[0]}").is_displayed())

    for tab in TABS:
        go(tab)
        check_accessible(page, tab)
    check(page, [*drawn(tmp_path, "cat", range(4)), *drawn(tmp_path, "star", [3])], "cat")
    check_accessible(page, "review")
    page.click("#teach")
    page.wait(lambda: page.all("#taught .figures"))
    check_accessible(page, "what changed")
    page.tab("ask")
    page.drop("ask", drawn(tmp_path, "star", [1]))
    page.wait(lambda: page.one("#attention").is_displayed())
    page.press(page.one("#attention"))
    page.wait(lambda: page.all(".shade"))
    check_accessible(page, "answer")

    def dialog(name: str, press: str) -> None:
        page.click(press)
        page.wait(lambda: page.one("#dialog").is_displayed())
        check_accessible(page, name, "#dialog")
        page.driver.execute_script("document.getElementById('dialog').close()")

    dialog("phone", "#phone")
    go("look")
    for name in ("rename", "merge", "forget"):
        dialog(name, f'tr[data-class="apple"] .{name}')
    dialog("return", "#history ~ .chips li button")
    go("look/cat")
    page.wait(lambda: len(page.all("#class .cell")) >= 4)
    page.press(page.all("#class .cell")[0])
    check_accessible(page, "class")
    page.write("#relabel", "star")
    dialog("correct", "#correct")


def test_tabs_change_with_arrow_keys(page):
    page.one("#tab-draw").send_keys(Keys.ARROW_RIGHT)
    page.wait(lambda: page.one("#view-look").is_displayed())
    assert page.one("#tab-look").get_attribute("aria-selected") == "true"
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-look"


def test_all_words_are_in_one_file_and_each_is_used():
    """Texts that people read are in texts.js: other scripts have no sentence in quotes."""
    static = Path(server.__file__).parent / "static"
    sources = {
        file.name: file.read_text(encoding="utf-8") for file in static.iterdir() if file.suffix in (".js", ".html")
    }
    defined = set(re.findall(r"^  (\w+):", sources.pop("texts.js"), re.MULTILINE))
    used = set(re.findall(r'\bT\.(\w+)|data-(?:text|label)="(\w+)"', "\n".join(sources.values())))
    assert defined == {script or page for script, page in used}
    for name, source in sources.items():
        lines = [line.split(" // ")[0].strip() for line in source.splitlines()]
        code = "\n".join(line for line in lines if not line.startswith(("//", "*", "/*")))
        if name.endswith(".js") and name != "docs.js":
            assert re.findall(r'"[A-Z][a-z]+ [a-z]+[^"]*"', code) == [], name


def test_the_page_of_the_interface_needs_nothing_from_elsewhere(page, client):
    page.driver.get(f"{client.url}/docs")
    page.wait(lambda: len(page.all(".operation")) > 20)
    assert "/v2/models/{name}/infer" in page.text("main")
    assert json.loads(client.get("/openapi.json").text)["paths"]["/models/{name}/state"]
