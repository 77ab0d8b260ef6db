"""The report in a browser: filters, sorting, details, keyboard, dark, phone, shared views; nothing from the network."""

import os
import shutil

import pytest
from made_runs import CPU, GPU, NASTY, SASS, candidate, cell, gpu_rows, put, put_cpu, put_gpu, put_tune

from tilery.measure.result import Row
from tilery.measure.store import Store
from tilery.pages import report, summary

BASE, LIGER = "baseline:torch", "baseline:liger"


@pytest.fixture(scope="module")
def chromium():
    missing = None if (path := shutil.which("chromium")) else "chromium is not installed: apt-get install chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing = "playwright is not installed: pip install 'tilery[test]'"
    if missing and os.environ.get("CI_NEEDS_BROWSER") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Viewer:
    """Opens pages and holds what went wrong on them."""

    def __init__(self, context, folder):
        self.context, self.folder, self.wrong = context, folder, []

    def open(self, *make, hash="", title=None):
        """A page of the runs that the functions put into a store."""
        store = Store(self.folder / "runs.sqlite3")
        self.runs = [one(store).id for one in make]
        self.collected = summary.collect(store, self.runs)
        file = self.folder / "report.html"
        file.write_text(report.render(store, self.collected, title), encoding="utf-8")
        self.address = file.as_uri()
        return self.visit(self.address + hash)

    def visit(self, address):
        page = self.context.new_page()
        page.set_default_timeout(120_000)  # ms: no test waits for it, it bounds a hang
        page.on("console", lambda said: self.wrong.append(said.text))
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda asked: self.wrong.append(asked.url) if asked.url.split("#")[0] != self.address else 0)
        page.goto(address)
        return page


@pytest.fixture
def viewer(chromium, tmp_path):
    """A window of a desktop; nothing may be logged, raised or asked of any network in a test that uses it."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    viewer = Viewer(context, tmp_path)
    yield viewer
    context.close()
    assert viewer.wrong == []


def kernels(page):
    return page.locator(".rows tr.line td:nth-child(3)").all_inner_texts()


def row_count(page):
    return page.locator(".rows tr.line").count()


def settled(page, text):
    page.wait_for_function("text => document.getElementById('row-count').textContent === text", arg=text)


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def overflow(page):
    return page.evaluate(OVERFLOW)


def narrow(page, width):
    """Charts are drawn anew after a change of size: what is on the page fits then."""
    page.set_viewport_size({"width": width, "height": 780})
    page.wait_for_function(f"{OVERFLOW} === 0")


ALL = len(gpu_rows())


def test_the_page_opens_with_every_part(viewer):
    page = viewer.open(put_gpu)
    assert page.locator("h1").inner_text() == f"Tilery on {GPU}" and row_count(page) == ALL
    assert page.locator(".tile").count() == 7 and page.locator(".bar-card").count() == 4
    assert page.locator(".size svg").count() == 1 and page.locator(".heat tbody tr").count() == 2
    assert page.locator(".roofline line.roof").count() == 4  # read, copy, bf16, fp32
    assert (
        "0123456789ab" in page.locator("#runs").inner_text() and "1 row failed" in page.locator("#notices").inner_text()
    )


def test_tiles_say_what_the_command_line_says(viewer):
    page = viewer.open(put_gpu)
    ours = summary.summary([f for f in viewer.collected.found if f.row.device == GPU])
    theirs = page.evaluate(f"sums(DATA.rows.filter((row) => row.device === '{GPU}'))")
    for name in ("kernels", "cases", "won", "compared", "failures"):
        assert theirs[name] == ours[name], name
    assert theirs["mean"] == pytest.approx(ours["mean"])
    for name in ("best", "worst"):
        assert theirs[name]["op"] == ours[name]["op"] and theirs[name]["kernel"] == ours[name]["kernel"]
    assert page.locator(".tile.mean .figure").inner_text() == "1.59×"
    assert page.locator(".tile.worst.lost .figure").inner_text() == "0.80×"
    heat = page.locator(".heat tbody tr").first.locator("td").all_inner_texts()
    assert [text.split()[0] for text in heat] == ["2.00×", "1.25×"]  # softmax: triton, cuda's better variant


def test_text_filters_rows_and_charts_alike(viewer):
    page = viewer.open(put_gpu)
    page.get_by_label("Filter", exact=True).fill("cuda.narrow M=8192")
    settled(page, f"1 of {ALL} rows")
    assert kernels(page) == ["cuda.narrow"] and page.locator(".bar-card").count() == 1
    assert page.locator(".roofline .mark").count() == 1 and page.locator(".tile.mean .figure").inner_text() == "1.25×"
    page.get_by_label("Filter", exact=True).fill("no such thing")
    settled(page, f"0 of {ALL} rows")
    assert page.locator("#nothing").is_visible() and page.locator(".device").is_hidden()
    page.get_by_role("button", name="Reset").click()
    assert row_count(page) == ALL and page.get_by_label("Filter", exact=True).input_value() == ""


def test_op_language_and_status_filter(viewer):
    page = viewer.open(put_gpu)
    page.get_by_label("Op", exact=True).select_option("matmul")
    assert row_count(page) == 4 and page.locator(".bar-card").count() == 1
    page.get_by_role("button", name="cuda", exact=True).click()
    assert kernels(page) == ["cuda.wide"]
    page.get_by_role("button", name="triton", exact=True).click()
    assert kernels(page) == ["triton", "cuda.wide"]
    assert page.get_by_role("button", name="triton", exact=True).get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Reset").click()
    page.get_by_label("Status", exact=True).select_option("fail")
    assert kernels(page) == ["cupy"]


def test_columns_sort_by_number_and_turn_round(viewer):
    page = viewer.open(put_gpu)
    time = page.locator("#column-ms")

    def shown():
        indexes = page.evaluate("[...document.querySelectorAll('.rows tr.line')].map((row) => +row.id.slice(4))")
        return [gpu_rows()[i].ms for i in indexes]

    time.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert time.get_attribute("aria-sort") == "ascending"
    known = sorted(row.ms for row in gpu_rows() if row.ms is not None)
    assert shown() == pytest.approx([*known, None, None, None])
    page.keyboard.press("Enter")
    assert time.get_attribute("aria-sort") == "descending"
    assert shown() == pytest.approx([*known[::-1], None, None, None])  # what has no time stays last
    page.locator("#column-kernel button").click()
    assert time.get_attribute("aria-sort") == "none" and kernels(page) == sorted(kernels(page))
    for button in page.locator(".rows th button").all():
        button.click()


def test_the_peer_changes_bars_tiles_and_heat(viewer):
    page = viewer.open(put_gpu)

    def bars():
        return page.locator(".bar-card").first.locator(".bar-row").all_inner_texts()

    assert [text.split() for text in bars()] == [
        ["triton", "2.00×"], ["liger", "1.60×"], ["cuda.narrow", "1.25×"], ["cuda.wide", "0.50×"]
    ]  # fmt: skip
    assert page.get_by_label("Held against").locator("option").all_inner_texts() == [
        "torch", "liger", "a copy of the same bytes"
    ]  # fmt: skip
    page.get_by_label("Held against").select_option(LIGER)
    assert [text.split() for text in bars()] == [
        ["triton", "1.25×"], ["cuda.narrow", "0.78×"], ["torch", "0.63×"], ["cuda.wide", "0.31×"]
    ]  # fmt: skip
    assert page.locator(".bar-card").count() == 3 and "1 case had no liger" in page.locator(".bar-list").inner_text()
    assert page.locator(".tile.mean .figure").inner_text() == "1.25×"
    assert "× liger" in page.locator("#column-ratio").inner_text()


def test_a_row_opens_by_keyboard_and_shows_its_code(viewer):
    page = viewer.open(put_gpu)
    opener = page.locator("tr.line", has_text="triton").first.locator(".opener")
    opener.focus()
    page.keyboard.press("Enter")
    assert opener.get_attribute("aria-expanded") == "true"
    said = page.locator(".details").inner_text()
    for words in ("Config(warps=4)", "95 % within", "× liger", "1980 MHz, 513 W, 55 °C", "32 registers", "50 %"):
        assert words in said, words
    assert SASS.split()[1] not in page.content().split("<script")[0]  # packed until it is opened
    fold = page.locator(".code summary", has_text="SASS")
    fold.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.code pre')[1].textContent !== '…'")
    assert page.locator(".code pre").nth(1).text_content() == SASS
    opener.focus()
    page.keyboard.press("Enter")
    assert page.locator(".details").count() == 0 and opener.get_attribute("aria-expanded") == "false"


def test_marks_are_reached_by_keyboard_and_lead_to_their_row(viewer):
    page = viewer.open(put_gpu)
    marks = page.locator(".roofline .mark")
    assert page.locator(".roofline .mark[tabindex='0']").count() == 1  # one tab stop, then arrows
    marks.first.focus()
    first = page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible() and page.locator("#tip").inner_text() != first
    page.keyboard.press("End")
    assert marks.last.evaluate("mark => mark === document.activeElement")
    page.keyboard.press("Enter")
    assert page.locator(".details").count() == 1
    assert page.evaluate("document.activeElement.className") == "opener"
    page.locator(".bar-row").first.focus()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_everything_that_acts_can_be_focused_and_shows_it(viewer):
    page = viewer.open(put_gpu)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "rows"
    page.locator("#reset").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unnamed = "[...document.querySelectorAll('button, select, input, [role=button], [role=img]')]"
    named = "node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length"
    assert page.evaluate(f"{unnamed}.filter((node) => !({named})).length") == 0


def test_a_cell_of_the_heat_map_narrows_the_page(viewer):
    page = viewer.open(put_gpu)
    page.get_by_role("button", name="softmax in cuda: 1.25× of torch, 3 cases").click()
    assert set(kernels(page)) == {"cuda.wide", "cuda.narrow"} and row_count(page) == 6
    assert page.evaluate("document.activeElement.id") == "reset"


def test_dark_is_a_button_that_is_remembered(viewer):
    page = viewer.open(put_gpu)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch to dark colours").click()
    dark = page.evaluate(ground)
    assert light == "rgb(251, 251, 250)" and dark == "rgb(15, 17, 20)"
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(ground) == light


def test_dark_follows_the_system_until_it_is_chosen(viewer):
    page = viewer.open(put_gpu)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 17, 20)"


@pytest.mark.parametrize("width", [360, 768])
def test_a_small_screen_does_not_scroll_sideways(viewer, width):
    page = viewer.open(put_gpu, put_cpu, title="A title as long as a kernel's name: " + "x" * 80)
    narrow(page, width)
    page.locator("tr.line", has_text="triton").first.locator(".opener").click()
    for fold in page.locator(".code summary").all():
        fold.click()
    for fold in page.locator("#notices summary").all():
        fold.click()
    assert overflow(page) == 0
    box = page.locator(".scroll.tall")
    assert (
        box.evaluate("node => node.scrollWidth > node.clientWidth") and box.evaluate("node => node.clientWidth") < width
    )
    assert page.locator(".roofline svg").first.evaluate("node => node.getBoundingClientRect().right") <= width


def test_the_address_holds_the_view(viewer):
    page = viewer.open(put_gpu, put_cpu)
    page.get_by_label("Filter", exact=True).fill("m=16, 100%")
    page.get_by_label("Filter", exact=True).fill("m=16")
    page.get_by_label("Device", exact=True).select_option(GPU)
    page.get_by_label("Held against").select_option(LIGER)
    page.get_by_role("button", name="triton", exact=True).click()
    page.get_by_role("button", name="cuda", exact=True).click()
    page.locator("#column-ms button").click()
    page.locator("#column-ms button").click()
    page.locator(".opener").first.click()
    settled(page, f"3 of {ALL + 3} rows")
    seen = page.locator("main").inner_text()
    other = viewer.visit(page.url)
    assert other.locator("main").inner_text() == seen and other.locator(".details").count() == 1
    assert other.get_by_label("Filter", exact=True).input_value() == "m=16"
    assert other.get_by_label("Held against").input_value() == LIGER
    assert other.get_by_role("button", name="cuda", exact=True).get_attribute("aria-pressed") == "true"
    other.get_by_role("button", name="Reset").click()
    assert "#" not in other.url and row_count(other) == ALL + 3
    other.evaluate("location.hash = 'op=matmul'")
    settled(other, f"4 of {ALL + 3} rows")


def test_a_view_from_another_report_is_taken_as_far_as_it_goes(viewer):
    page = viewer.open(put_gpu, hash="#op=conv&language=warp,triton&peer=baseline:none&row=99999,x&sort=colour&device=")
    assert set(kernels(page)) == {"triton"} and page.get_by_label("Held against").input_value() == BASE


def test_devices_have_sections_of_their_own(viewer):
    page = viewer.open(put_gpu, put_cpu)
    assert page.locator(".device h2").all_inner_texts() == [GPU, CPU]
    assert page.locator("#device-1 .tile.mean .figure").inner_text() == "4.00×"
    assert page.locator("#device-1 .roofline .mark").count() == 2  # numba and torch
    assert page.locator("#device-1 line.roof").count() == 0
    assert "no roof is drawn" in page.locator("#device-1").inner_text()
    assert "2 devices" in page.locator("#notices").inner_text()
    page.get_by_label("Device", exact=True).select_option(CPU)
    assert page.locator("#device-0").is_hidden() and row_count(page) == 3


def test_what_a_compiler_said_stays_text(viewer):
    page = viewer.open(put_gpu, hash="#status=fail")
    page.locator(".opener").click()
    assert NASTY.split(" \u2028")[0] in page.locator(".details").inner_text()
    assert page.locator("img").count() == 0
    page.locator("#notices .link").click()
    assert row_count(page) == 1


def test_a_run_without_times_still_opens(viewer):
    page = viewer.open(
        lambda store: put(store, [Row("softmax", "triton", "m=1,n=2,dtype=bf16", "compiled", arch="sm_90")])
    )
    assert row_count(page) == 1 and page.locator(".device").count() == 0
    assert "Nothing was timed" in page.locator("#notices").inner_text()


def test_a_run_with_what_is_no_number_still_opens(viewer):
    def odd(store):
        rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 2.0, "cuda": 3.0, "cupy": 4.0})
        rows[2].error, rows[2].roof, rows[2].tflops = float("inf"), float("nan"), float("nan")
        rows[3].ms, rows[3].samples = float("nan"), (float("nan"),) * 6
        rows[4].samples, rows[4].gbps = (), None
        return put(store, rows)

    page = viewer.open(odd, hash="#sort=error&row=2,3,4")
    assert row_count(page) == 5 and page.locator(".details").count() == 3
    assert "∞" in page.locator("tr.line", has_text="triton").inner_text()
    assert [text.split()[0] for text in page.locator(".bar-row").all_inner_texts()] == ["cupy", "triton"]


def test_many_cases_and_rows_are_shown_when_asked_for(viewer):
    def many(store):
        cases = [f"m={m},n=4096,dtype=bf16" for m in range(1, 101)]
        return put(store, [row for case in cases for row in cell("softmax", case, 1.0, {"triton": 2.0})])

    page = viewer.open(many)
    assert page.locator(".bar-card").count() == 18 and row_count(page) == 250
    page.get_by_role("button", name="Show all 100 cases").click()
    page.get_by_role("button", name="Show all 300 rows").click()
    assert page.locator(".bar-card").count() == 100 and row_count(page) == 300


def candidates(page):
    return page.locator(".candidates tbody tr")


def test_a_tune_shows_every_candidate_with_winner_default_and_reasons(viewer):
    page = viewer.open(put_tune)
    assert page.locator("#rows").is_hidden() and page.locator(".device").count() == 0
    assert "9 candidates of 1 tuned problem" in page.locator("#lede").inner_text()
    assert (
        page.locator(".landscape .chart .mark").count() == 9
        and page.locator(".landscape .chart .mark.failed").count() == 2
    )
    assert sorted(page.locator(".ring-words").all_text_contents()) == ["default", "default", "winner"]
    said = page.locator(".landscape > .words").inner_text()
    assert "triton (block_m 128 · warps 8) won with 40.00 µs, 1.50×, 95 % within" in said.replace("\u00a0", " ")
    first, failed = candidates(page).first.inner_text(), candidates(page).nth(5).inner_text()
    assert first.split()[:4] == ["winner", "triton", "40.00", "µs"] and NASTY.split(" \u2028")[0] in failed
    assert candidates(page).count() == 9 and page.locator("img").count() == 0
    page.locator(".landscape .chart .mark.failed").last.hover()
    assert "spills: 64 bytes" in page.locator("#tip").inner_text()


def test_candidates_stand_higher_the_slower_they_are_and_highest_without_a_time(viewer):
    page = viewer.open(put_tune)
    places = page.locator(".landscape .chart .mark").evaluate_all(
        "marks => marks.map((m) => m.getBoundingClientRect().top)"
    )
    timed, others = places[:5], places[5:]
    assert timed == sorted(timed, reverse=True) and max(others) < min(timed)


def test_candidates_stand_along_a_field_of_their_configs(viewer):
    page = viewer.open(put_tune)
    page.get_by_label("Along", exact=True).select_option("block_m")
    ticks = page.locator(".landscape .tick[text-anchor=middle]").all_text_contents()
    assert ticks == ["64", "128", "256", "none"] and "along=block_m" in page.url
    other = viewer.visit(page.url)
    assert other.get_by_label("Along", exact=True).input_value() == "block_m"
    columns = other.locator(".landscape .chart .mark").evaluate_all(
        "marks => marks.map((m) => m.getBoundingClientRect().left)"
    )
    assert columns[0] < columns[2] and columns[3] < columns[0]  # 128, none, 64


def test_filters_narrow_a_landscape_and_marks_lead_to_its_table(viewer):
    page = viewer.open(put_gpu, put_tune)
    assert row_count_of_table(page) == ALL and page.locator("#tunes").is_visible()
    page.get_by_role("button", name="cuda", exact=True).click()
    assert candidates(page).count() == 3 and page.locator(".landscape .chart .mark").count() == 3
    assert "triton" in page.locator(".landscape > .words").inner_text()  # who won does not hang on a filter
    page.locator(".landscape .chart .mark").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == candidates(page).nth(1).get_attribute("id")
    page.get_by_label("Filter", exact=True).fill("softmax")
    settled(page, f"{2 * 3} of {ALL} rows")
    assert page.locator("#tunes").is_hidden()


def row_count_of_table(page):
    return page.locator("#rows tr.line").count()


def test_a_tune_of_many_problems_and_candidates_is_shown_when_asked_for(viewer):
    def many(store):
        cases = [f"m={m},n=4096,k=4096,dtype=bf16" for m in range(1, 16)]
        configs = [f"Config(warps={w})" for w in range(1, 31)]
        rows = [candidate("triton", c, 0.1 + 0.01 * i, case=k) for k in cases for i, c in enumerate(configs)]
        return put_tune(store, rows=rows)

    page = viewer.open(many)
    assert page.locator(".landscape").count() == 12 and candidates(page).count() == 12 * 10
    assert "No candidate won." in page.locator(".landscape").first.inner_text()
    page.get_by_role("button", name="Show all 15 tuned problems").click()
    page.get_by_role("button", name="Show all 30 candidates").first.click()
    assert page.locator(".landscape").count() == 15 and candidates(page).count() == 30 + 14 * 10
    page.locator(".landscape").nth(1).locator(".chart .mark").last.click()
    assert candidates(page).count() == 2 * 30 + 13 * 10


def test_a_tune_on_a_phone_in_which_nothing_was_right(viewer):
    page = viewer.open(lambda store: put_tune(store, rows=[candidate("triton", "", status="fail", reason="wrong")]))
    narrow(page, 360)
    assert page.locator(".landscape .chart .mark.failed").count() == 1
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "tunes"


def test_it_prints(viewer):
    page = viewer.open(put_gpu)
    page.emulate_media(media="print")
    assert page.locator("#filters").is_hidden() and page.locator(".rows").is_visible()
    assert len(page.pdf()) > 10_000
