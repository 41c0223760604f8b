"""The page of a result: its text, and what it does in headless Chromium."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from mega_eval import metrics
from mega_eval.cli import cli
from mega_eval.report_page.examples_data import find_judges
from mega_eval.report_page.intervals import draw_intervals
from mega_eval.report_page.page import render_results
from mega_schema.errors import ConfigError
from tests.result_files import HOSTILE, make_examples, write_made_up

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A result with 5,000 examples, of which every third is wrong."""
    examples = make_examples([index % 3 != 0 for index in range(5000)])
    examples[7] = replace(
        examples[7], prompt=HOSTILE, tags={HOSTILE: HOSTILE}, choices=((HOSTILE, -1.0), ("word7", -0.5))
    )
    examples[8] = replace(examples[8], prompt="long " * 400)
    return write_made_up(tmp_path_factory.mktemp("page") / "many.json", examples)


@pytest.fixture(scope="module")
def browser():
    """Start Chromium once."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, many, tmp_path):
    """Open the page of two results without a network; fail on an error of its script."""
    partial = write_made_up(tmp_path / "other.json", make_examples([True] * 30), model="b", is_whole=False)
    file = tmp_path / "report.html"
    file.write_text(render_results([many, partial]), "utf-8")
    context = browser.new_context(offline=True)
    opened = context.new_page()
    errors = []
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(file.as_uri())
    yield opened
    context.close()
    assert errors == []


def test_the_page_is_whole_by_itself(many):
    class References(HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert tag not in ("link", "img", "iframe")
            assert not {"src", "href"} & dict(attributes).keys()

    html = render_results([many])
    References().feed(html)
    assert "default-src 'none'" in html
    assert "0.6666" in html
    for digest in (many.record["model"]["sha256"], *many.data_hashes, "f" * 64):
        assert digest in html
    assert "mega-eval lambada --data &#x27;a b&#x27;" in html
    assert "right &lt;answers&gt;" in html
    assert "onerror" not in html.replace("\\u003cimg src=x onerror", "")


def test_numbers_are_those_of_the_table_and_too_few_examples_are_words(tmp_path):
    few = render_results([write_made_up(tmp_path / "a.json", make_examples([True, False], [650.0, 650.0]))])
    assert "<td class=n>too few examples</td>" in few
    assert re.search(r"<td class=n>\d\.\d{4}e\+\d{3}</td>", few)
    many = render_results([write_made_up(tmp_path / "b.json", make_examples([True, False] * 50))])
    assert "<td class=n>too few examples</td>" not in many


def test_a_result_that_is_not_publishable_says_so(tmp_path):
    whole = write_made_up(tmp_path / "a.json", make_examples([True, False]))
    partly = write_made_up(tmp_path / "b.json", make_examples([True, False]), is_whole=False)
    assert "Not publishable" not in render_results([whole])
    assert "Not publishable: lambada · strict · a/iter_0000010 left examples out" in render_results([partly])


def test_ranks_noise_versions_and_the_published_file_are_in_the_provenance(tmp_path):
    identity = {
        "layout": {"tp": 2, "pp": 4, "dp": 3},
        "noise": 0.00012345,
        "versions": {"transformers": "5.1"},
    }
    options = {"canonical_data": True}
    full = write_made_up(tmp_path / "a.json", make_examples([True]), identity=identity, options=options)
    plain = write_made_up(tmp_path / "b.json", make_examples([True]), options={"canonical_data": False})
    cells = dict(
        re.findall(r'<td class="name">([^<]+)</td><td class="wide">([^<]*)</td>', render_results([full]))
    )
    assert cells["ranks"] == "tp 2, pp 4, dp 3"
    assert cells["noise of ln P"] == "0.00012"
    assert cells["versions of the model"] == "transformers 5.1"
    assert cells["published file"] == "yes"
    html = render_results([plain])
    assert "noise of ln P" not in html
    assert '<td class="name">published file</td><td class="wide">no</td>' in html


def test_intervals_of_one_metric_are_drawn_on_one_scale():
    narrow, wide = (
        replace(metrics.mean([1.0, 2.0], "d"), interval=interval) for interval in ((1.4, 1.6), (1, 2))
    )
    svgs = draw_intervals([narrow, metrics.mean([1.0], "d"), wide])
    assert svgs[1] == ""
    ends = [
        re.findall(r'<line x1="([\d.]+)" x2="([\d.]+)" y1="9" y2="9"', svg)[0] for svg in (svgs[0], svgs[2])
    ]
    assert [tuple(map(float, pair)) for pair in ends] == [(89.2, 130.8), (6, 214)]


def test_only_scores_of_0_and_1_judge_an_example(many):
    assert find_judges(many) == ["correct"]


def test_the_browser_shows_a_page_of_examples_and_filters_them(page):
    assert page.title() == "Evaluation: lambada"
    assert page.locator("article").count() == 25
    assert page.locator("#status").inner_text() == "1 to 25 of 5,000"
    assert page.locator("[data-filter]").all_inner_texts() == ["all 5,000", "right 3,333", "wrong 1,667"]
    page.get_by_role("button", name="wrong").click()
    assert page.locator("h3").all_inner_texts()[:3] == ["0", "3", "6"]
    assert set(page.locator(".verdict").all_inner_texts()) == {"✗ wrong"}
    page.get_by_role("button", name="next").first.click()
    assert page.locator("#status").inner_text() == "26 to 50 of 1,667"
    page.get_by_label("search").fill("WORD4998")
    assert page.locator("h3").all_inner_texts() == ["4998"]
    assert page.locator(".position").first.inner_text() == "page 1 of 1"
    page.get_by_label("search").fill("no such words")
    assert page.locator("#status").inner_text() == "No example matches."


def test_the_browser_takes_text_of_examples_as_text(page):
    page.get_by_label("search").fill("onerror")
    card = page.locator("article")
    assert card.count() == 1
    assert HOSTILE in card.inner_text()
    assert card.locator("img, script").count() == 0
    assert card.locator(".choices tr").all_inner_texts()[1].startswith("● word7")
    assert page.title() == "Evaluation: lambada"


def test_the_keyboard_turns_pages_filters_and_moves_between_examples(page):
    page.keyboard.press("n")
    assert page.locator("#status").inner_text() == "26 to 50 of 5,000"
    page.keyboard.press("w")
    assert page.locator("#status").inner_text() == "1 to 25 of 1,667"
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.querySelector('h3').textContent") == "3"
    page.keyboard.press("/")
    page.keyboard.type("word42")
    assert page.evaluate("document.activeElement.id") == "search"
    assert page.locator("h3").first.inner_text() == "42"
    page.keyboard.press("Escape")  # clears a search field
    page.keyboard.press("a")
    assert page.locator("#status").inner_text() == "1 to 25 of 5,000"


def test_tokens_are_coloured_by_their_log_probability_and_sorted_by_it(page):
    page.locator("#order").select_option("surprising")
    tokens = page.locator(".token")
    assert tokens.first.get_attribute("title").startswith("ln P -5.0000, P 0.674 %")
    strong = tokens.first.evaluate("node => getComputedStyle(node).backgroundColor")
    page.locator("#order").select_option("expected")
    weak = tokens.first.evaluate("node => getComputedStyle(node).backgroundColor")
    assert (strong, weak) == ("rgba(214, 96, 40, 0.376)", "rgba(214, 96, 40, 0.075)")


def test_the_browser_changes_between_results_and_shows_long_prompts_on_demand(page):
    page.locator("#result").select_option(index=1)
    assert page.locator("#status").inner_text() == "1 to 25 of 30"
    page.locator("#result").select_option(index=0)
    page.get_by_label("search").fill("long long")
    summary = page.locator("summary")
    assert len(summary.inner_text()) < 600
    summary.click()
    assert page.locator("details .text").last.inner_text().count("long") == 400


def test_the_command_replaces_a_page_only_on_demand_and_nothing_else(many, tmp_path):
    output = tmp_path / "p.html"
    words = ["report", str(many.path), "--output", str(output)]
    runner = CliRunner()
    for more in ([], ["--overwrite"]):
        outcome = runner.invoke(cli, words + more, catch_exceptions=False)
        assert outcome.output == f"written to {output}: 1 result, 5,000 examples\n"
    assert output.read_text("utf-8") == render_results([many])
    output.write_text("<!doctype html>mine")
    with pytest.raises(ConfigError, match=r"--output: a file of this name exists: found .*; hint: .*--overw"):
        runner.invoke(cli, words, catch_exceptions=False)
    output.write_text("notes")
    with pytest.raises(ConfigError, match="is a file that this command did not write"):
        runner.invoke(cli, [*words, "--overwrite"], catch_exceptions=False)
    assert output.read_text() == "notes"


def test_a_task_writes_its_page_on_request(run, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "1 2 3"}\n')
    words = ["lambada", "--load", run, "--data", tmp_path / "data.jsonl", "--output", tmp_path / "r.json"]
    arguments = [*map(str, words), "--device=cpu", "--report"]
    outcome = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert outcome.output.endswith(f"written to {tmp_path / 'r.json'} and {tmp_path / 'r.html'}\n")
    assert "Evaluation: lambada" in (tmp_path / "r.html").read_text("utf-8")
    (tmp_path / "r.json").unlink()
    with pytest.raises(ConfigError, match=r"--report: a file of this name exists: found .*r\.html; hint"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert CliRunner().invoke(cli, [*arguments, "--overwrite"], catch_exceptions=False).exit_code == 0
