"""A real run of the demo in a real browser: the page follows it and controls it."""

import json
import signal

import pytest
from browser.conftest import PROMPTS, dashboard, demo_run
from PIL import Image

from gracetune.cli.main import main
from gracetune.events.log import read_events


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A demo run that trains until it is stopped, and its dashboard."""
    folder = tmp_path_factory.mktemp("live")
    with demo_run(folder) as process:
        while not (folder / "run" / "now" / "listening.json").exists():
            assert process.poll() is None, process.communicate()
        with dashboard(folder / "run") as address:
            yield folder / "run", address, process


@pytest.fixture
def page(live, open_page):
    page = open_page(live[1])
    page.locator(".badge", has_text="running").wait_for()
    page.locator("#panel-samples .cell").first.wait_for()
    return page


def events(folder, kind):
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def send(page, verb, fill=None):
    """Press a button of the run, fill in the dialog and confirm it."""
    page.locator(f"button[data-verb={verb}]").click()
    if fill is not None:
        page.locator("dialog textarea, dialog input").fill(fill)
    page.locator("dialog button[type=submit]").click()


def test_panels_fill_while_the_run_trains(page):
    for panel in ("loss", "held-out", "rate", "gradient", "throughput", "memory", "phases"):
        place = page.locator(f"#panel-{panel}")
        place.scroll_into_view_if_needed()
        place.locator("canvas").first.wait_for()
        label = place.locator(".plot").first.get_attribute("aria-label")
        assert "Latest" in label
        assert "–" not in label.partition("Latest")[2], label
    steps = page.locator(".steps").inner_text()
    page.locator(".steps").filter(has_not_text=steps).wait_for()
    for panel in (
        "moved",
        "block-gradients",
        "block-weights",
        "data-report",
        "machine-facts",
        "settings",
        "log",
    ):
        assert page.locator(f"#panel-{panel}.empty").count() == 0, panel


def test_arrow_keys_move_through_samples(page):
    select, slider = (
        page.locator("#panel-samples select"),
        page.locator("#panel-samples [type=range]"),
    )
    page.locator("#panel-samples .sample-grid tbody tr").nth(1).wait_for()
    caption = page.locator("#panel-samples figcaption").first
    assert PROMPTS[0] in caption.inner_text()
    page.keyboard.press("ArrowRight")
    assert select.input_value() == "1"
    assert PROMPTS[1] in caption.inner_text()
    page.keyboard.press("ArrowLeft")
    assert select.input_value() == "0"
    before = int(slider.input_value())
    page.keyboard.press("ArrowDown")
    assert int(slider.input_value()) == before - 1
    assert (
        "step 0" in page.locator("#panel-samples figcaption strong").first.inner_text()
        or before > 1
    )
    page.keyboard.press("c")
    page.keyboard.press("ArrowUp")
    assert page.locator("#panel-samples figure.large").count() == 2
    image = page.locator("#panel-samples figure.large img").first
    assert image.evaluate("(image) => image.complete && image.naturalWidth") == 24
    page.keyboard.press("c")
    assert page.locator("#panel-samples figure.large").count() == 1


def test_validate_now_with_own_prompts_makes_a_new_grid(page, live):
    send(page, "validate", "a purple square on a white background\na red ring")
    page.locator(".sent", has_text="validate taken at step").wait_for()
    page.locator(".sample-grid .tag", has_text="asked").first.wait_for()
    page.locator("#panel-samples option", has_text="a red ring").wait_for(state="attached")
    page.locator("#panel-samples select").select_option(label="a red ring")
    image = page.locator("#panel-samples figure.large img").first
    image.wait_for()
    requested = [event for event in events(live[0], "validated") if event["request"]]
    assert requested[0]["prompts"] == ["a purple square on a white background", "a red ring"]


def test_the_token_stays_in_its_tab(page, live):
    """A reload needs nothing; another tab needs the address; nothing is sent to other ports."""
    page.reload()
    page.locator("#panel-samples .cell img").first.wait_for()
    page.locator(".connection", has_text="live").wait_for()
    assert page.context.cookies() == []
    image = page.locator("#panel-samples .cell img").first
    page.wait_for_function("(image) => image.naturalWidth > 0", arg=image.element_handle())
    with page.context.browser.new_context() as context:  # its errors are expected
        other = context.new_page()
        other.goto(live[1].partition("#")[0])
        other.get_by_text("This address has no valid token").wait_for()


def test_save_now_and_changed_logging_are_taken(page, live):
    send(page, "save")
    page.locator(".sent", has_text="save taken at step").wait_for()
    send(page, "log", "2")
    page.locator(".sent", has_text="log taken at step").wait_for()
    taken = events(live[0], "request_taken")
    assert [one["request"] for one in taken][-2:] == ["save", "log"]
    assert {one["source"] for one in taken} == {"dashboard"}
    assert [one["reason"] for one in events(live[0], "checkpoint_saved")]


def test_the_page_says_what_it_looks_like_to_screen_readers(page):
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, img, canvas")]
        .filter((one) => !one.closest("[hidden], [aria-hidden]") && one.offsetParent !== null)
        .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("alt") !== null ||
            one.textContent.trim() || one.closest("label") || one.closest("[aria-label]")))
        .map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("h1, h2").count() > 5
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_charts_are_read_out_with_the_keyboard(page):
    plot = page.locator("#panel-loss .plot")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "smoothed" in page.locator("#announce").inner_text()


def test_a_part_of_the_run_can_be_magnified(page):
    page.locator("#panel-loss").scroll_into_view_if_needed()
    box = page.locator("#panel-loss .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 30, steps=4)
    page.mouse.up()
    reset = page.locator("button", has_text="Whole run")
    reset.wait_for()
    reset.click()
    reset.wait_for(state="hidden")


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_any_width(live, open_page, width, scheme):
    page = open_page(live[1], width=width, scheme=scheme, reduced="reduce")
    page.locator("#panel-samples .cell").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("button", has_text="Dark" if scheme == "light" else "Light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_stop_saves_and_the_page_says_so(page, live, open_page, tmp_path):
    """The last test of the run."""
    folder, _, process = live
    send(page, "stop")
    page.locator(".badge", has_text="stopped").wait_for()
    assert process.wait(timeout=60) == 130
    [last] = events(folder, "run_ended")
    saved = events(folder, "checkpoint_saved")[-1]
    assert saved["step"] == last["step"]
    assert (folder / "checkpoints" / f"step-{last['step']:06d}" / "manifest.json").is_file()
    assert page.locator("button[data-verb]").count() == 0

    report = tmp_path / "report.html"
    assert main(["report", str(folder), "-o", str(report)]) == 0
    copy = open_page(report.as_uri())
    copy.locator(".badge", has_text="stopped").wait_for()
    copy.locator("#panel-loss canvas").wait_for()
    copy.locator("#panel-samples figure.large img").first.wait_for()
    copy.keyboard.press("ArrowRight")
    assert copy.locator("#panel-samples select").input_value() == "1"
    assert "tiny" in copy.locator("#panel-settings").inner_text()


def test_a_killed_run_is_shown_as_killed(tmp_path, open_page):
    folder = tmp_path / "run"
    with demo_run(tmp_path, "validation.every=0") as process, dashboard(folder) as address:
        page = open_page(address)
        page.locator(".badge", has_text="running").wait_for()
        page.locator("#panel-loss canvas").wait_for()
        process.send_signal(signal.SIGKILL)
        page.locator(".badge", has_text="killed").wait_for()
        text = page.locator("#health").inner_text()
        assert "ended without a last message" in text
        assert "Last seen at" in text
        assert "step" in text
        page.close()


def test_the_plan_of_a_run_file_is_shown(open_page, tmp_path):
    from browser.conftest import ROOT

    file = tmp_path / "flux.json"
    text = (ROOT / "examples" / "flux-lora.json").read_text()
    file.write_text(text)
    with dashboard(file, "--machine", "gh200-96") as address:
        page = open_page(address)
        page.locator("#plan h3", has_text="flux").wait_for()
        text = page.locator("#plan").inner_text()
        assert "Device memory" in text
        assert "57 blocks" in text
        assert "samples/s" in text
        assert "max_train_steps" in page.locator("#panel-settings").inner_text()
        page.close()


def small_run(folder, *records):
    """A finished run of two steps with three samples: two seeds of one prompt, and another one."""
    samples = folder / "validation" / "step-000002"
    samples.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(samples / f"{number:03d}.png")
    settings = [{"number": number, "seed": 40 + number} for number in range(3)]
    (samples / "samples.json").write_text(json.dumps({"samples": settings}))
    step = {"event": "step_done", "time": 2.0, "lr": 1.0, "samples": 1, "seconds": 1.0}
    found = [
        {"event": "run_started", "time": 1.0, "model": "tiny", "total_steps": 3},
        *(step | {"step": number, "loss": loss} for number, loss in ((1, 0.5), (2, "nan"), (3, 1))),
        {"event": "validated", "time": 3.0, "step": 2, "grid": "/x/validation/step-000002.png",
         "prompts": ["a fox", "a fox", "a hare"], "losses": {}, "seconds": 1.0},
        *records,
        {"event": "run_ended", "time": 9.0, "step": 3, "status": "done", "seconds": 1.0},
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))


def report_of(folder):
    target = folder.with_suffix(".html")
    assert main(["report", str(folder), "-o", str(target)]) == 0
    return target.as_uri()


def test_one_prompt_with_two_seeds_has_two_columns(tmp_path, open_page):
    small_run(tmp_path / "run")
    page = open_page(report_of(tmp_path / "run"))
    heads = page.locator("#panel-samples .column-head").all_inner_texts()
    assert heads == ["a fox (seed 40)", "a fox (seed 41)", "a hare"]
    assert page.locator("#panel-samples .cell").count() == 3
    page.keyboard.press("ArrowRight")
    assert "a fox (seed 41)" in page.locator("#panel-samples figcaption").inner_text()


def test_a_resumed_run_counts_all_processes_and_its_losses_by_samples(tmp_path, open_page):
    """Processes of 10 s and 7 s, and one that was killed 3 s after its start."""
    started = {"event": "run_started", "model": "tiny", "total_steps": 6}
    step = {"event": "step_done", "lr": 1.0, "seconds": 0.5, "accumulation": 1}
    parts = {"event": "loss_parts", "by_dataset": {"data": {"loss": 1.0, "samples": 4}}}
    ended = {"event": "run_ended", "status": "interrupted"}

    def losses(at, number, **ranges):
        by = {name: {"loss": loss, "samples": count} for name, (loss, count) in ranges.items()}
        return parts | {"time": at, "step": number, "by_timestep": by}

    found = [
        started | {"time": 0.0, "start_step": 0},
        *(step | {"time": n, "step": n, "loss": 7.0 - n, "samples": 4} for n in (1, 2)),
        losses(2.0, 2, low=(5.0, 100), high=(3.0, 100)),
        ended | {"time": 10.0, "step": 2, "seconds": 10.0},
        started | {"time": 20.0, "start_step": 2},
        step | {"time": 23.0, "step": 3, "loss": 4.0, "samples": 4},
        losses(23.0, 3, low=(1.0, 1)),  # one step, and no sample of the other range
        started | {"time": 30.0, "start_step": 3},
        *(step | {"time": 30 + n, "step": n, "loss": 7.0 - n, "samples": n - 3} for n in (4, 5, 6)),
        losses(36.0, 6, low=(4.9, 100), high=(2.9, 100)),
        ended | {"time": 37.0, "step": 6, "seconds": 7.0, "status": "done"},
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    page = open_page(report_of(folder))
    assert page.locator("td[data-label=Time]").inner_text() == "20 s in 3 parts"
    speed = page.locator("td[data-label=Speed]").inner_text()
    assert speed == page.locator("#panel-throughput .value").inner_text().replace(
        "/s", " samples/s"
    )
    assert page.locator("#panel-loss-datasets .why").inner_text() == "The run has one dataset."
    plot = page.locator("#panel-loss-timesteps .plot")
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    text = page.locator("#announce").inner_text()
    low, high = (float(part.split()[-1]) for part in text.partition(": ")[2].split(", ")[::-1])
    assert low > 4.8, text
    assert 2.9 < high < 3.0, text
    smoothed = float(page.locator("#panel-loss .key", has_text="smoothed").inner_text().split()[-1])
    assert 1.0 < smoothed < 6.0


def test_a_falling_loss_is_smoothed_without_a_lag(tmp_path, open_page):
    step = {"event": "step_done", "lr": 1.0, "seconds": 0.5, "samples": 4}
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [step | {"time": n, "step": n, "loss": 10.0 - n / 100} for n in range(1, 802)]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    page = open_page(report_of(folder))
    page.locator("#panel-loss .plot").focus()
    page.keyboard.press("Home")
    for _ in range(400):
        page.keyboard.press("ArrowRight")
    text = page.locator("#announce").inner_text()
    raw, smoothed = (float(part.split()[-1]) for part in text.partition(": ")[2].split(", "))
    assert smoothed == pytest.approx(raw, abs=0.01), text


def test_a_skipped_batch_does_not_read_as_a_run_that_stops(tmp_path, open_page):
    skipped = {"event": "batch_skipped", "time": 2.5, "step": 2, "loss": "nan", "samples": []}
    for name, records in (("skipped", [skipped]), ("not", [])):
        small_run(tmp_path / name, *records)
    text = open_page(report_of(tmp_path / "skipped")).locator("#health").inner_text()
    assert "at step 2. These batches did not change the weights" in text
    assert "loss not finite" not in text
    assert "stops" not in text.lower()
    text = open_page(report_of(tmp_path / "not")).locator("#health").inner_text()
    assert "The loss is NaN or infinite at step 2." in text


def test_charts_of_several_runs_stay_when_one_goes_on(tmp_path, open_page):
    moved = {"event": "weights_moved", "time": 4.0, "measure": "adapter"}
    rows = [moved | {"step": step, "blocks": {"a": 0.1, "b": 0.2, "c": 0.3}} for step in (1, 2, 3)]
    for name in ("one", "two"):
        small_run(tmp_path / name, *rows[:2])
    with dashboard(tmp_path / "one", tmp_path / "two") as address:
        page = open_page(address)
        panel = page.locator("#panel-moved-mean")
        panel.scroll_into_view_if_needed()
        panel.locator("canvas").nth(1).wait_for()
        with (tmp_path / "one" / "events.jsonl").open("a") as log:
            log.write(json.dumps(rows[2] | {"time": 10.0}) + "\n")
        panel.locator(".plot[aria-label*='step 1 to 3']").wait_for()
        assert panel.locator("canvas").count() == 2
        page.close()


def test_a_damaged_run_leaves_the_other_alone(tmp_path, browser):
    """Events with unexpected contents spoil one panel at most."""
    small_run(tmp_path / "good")
    odd = {"event": "rates_spread", "time": 2.0, "step": 1, "counts": 7, "limits": 3}
    small_run(tmp_path / "odd", odd, {"event": "notice", "time": 1e300, "text": "x"})
    with dashboard(tmp_path / "good", tmp_path / "odd") as address:
        page = browser.new_page()
        page.goto(address)
        page.locator("#panel-rates .why", has_text="cannot be drawn").wait_for(state="attached")
        page.locator("#panel-loss canvas").wait_for()
        assert page.locator(".badge", has_text="done").count() == 2
        page.close()


HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "javascript:alert(1)",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
)


def hostile_run(folder):
    """A log whose texts are all markup."""
    text = HOSTILE[0] + HOSTILE[1]
    samples = folder / "validation" / "step-000001"
    samples.mkdir(parents=True)
    for number in range(len(HOSTILE)):
        (samples / f"{number:03d}.png").write_bytes(b"not an image")
    settings = [{"number": number, "seed": text, "problem": text} for number in range(3)]
    (samples / "samples.json").write_text(json.dumps({"samples": settings}))
    step = {"event": "step_done", "time": 2.0, "step": 1, "loss": 1.0, "lr": 1.0, "expert": text}
    named = {text: {"loss": 1.0, "samples": 1}}
    records = [
        {"event": "run_started", "time": 1.0, "model": text, "total_steps": 9, "device": text},
        {"event": "notice", "time": 1.0, "text": text, "level": text},
        {"event": "stage_progress", "time": 1.0, "stage": text, "done": 1, "total": 1},
        step | {"samples": 1, "seconds": 1.0, "grad_norm": 1.0},
        {"event": "loss_parts", "time": 2.0, "step": 1, "by_dataset": named, "by_timestep": named},
        {"event": "weights_moved", "time": 2.0, "step": 1, "blocks": {text: 1.0}},
        {"event": "health", "time": 2.0, "step": 1, "check": text, "level": "notice",
         "cause": text, "action": text, "advice": text},
        {"event": "health", "time": 2.0, "step": 1, "check": "x", "level": text, "cause": text},
        {"event": "run_described", "time": 1.0, "machine": {text: text, "gpus": [{"name": text}]},
         "versions": {text: text}, "data": {"datasets": [{"id": text, "type": text}],
         "buckets": [{"size": text, "samples": 1, "batches": 1}],
         "corrupt": [{"file": text, "reason": text}]}, "plan": None},
        {"event": "validated", "time": 2.0, "step": 1, "grid": "/x/validation/step-000001.png",
         "prompts": list(HOSTILE), "losses": {text: 1.0}, "seconds": 1.0},
        {"event": "request_taken", "time": 2.0, "step": 1, "request": text, "reason": text},
        {"event": "run_ended", "time": 3.0, "step": 1, "status": text, "message": text,
         "seconds": 1.0},
    ]  # fmt: skip
    with (folder / "events.jsonl").open("w") as log:
        log.writelines(json.dumps(record) + "\n" for record in records)
    (folder / "run.json").write_text(json.dumps({text: {text: text}}))


def test_texts_of_a_run_are_never_markup(tmp_path, browser):
    """Pages may report images that do not load; nothing may run."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    hostile_run(folder)
    report = tmp_path / "report.html"
    assert main(["report", str(folder), "-o", str(report)]) == 0
    with dashboard(folder) as address:
        for place in (address, report.as_uri()):
            page = browser.new_page()
            dialogs = []
            page.on("dialog", lambda dialog, seen=dialogs: (seen.append(dialog), dialog.dismiss()))
            page.goto(place)
            page.locator("html[data-ready=true]").wait_for(state="attached")
            page.locator(".cause", has_text="onerror").first.wait_for()
            for _ in range(len(HOSTILE)):
                page.keyboard.press("ArrowRight")
            assert HOSTILE[0] in page.locator("#panel-log").inner_text()
            assert "owned" not in page.title()
            assert page.locator("img[src=x], svg[onload], [onerror], [onmouseover]").count() == 0
            assert page.evaluate("document.scripts.length") <= 5
            assert dialogs == []
            page.close()
