import itertools
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from mega_eval import metrics
from mega_eval.cli import cli
from mega_eval.commands.compare import format_comparisons
from mega_eval.commands.sweep import format_sweep
from mega_eval.comparison import compare_results
from mega_eval.paired_statistics import (
    benjamini_hochberg,
    bootstrap_p_value,
    bootstrap_ratios,
    mcnemar_exact,
    percentile_interval,
)
from mega_eval.result_reader import read_result
from mega_eval.sweep import MetricPoint, MetricSpread, SweepPoint
from mega_schema.errors import ConfigError, FormatError
from tests.result_files import make_examples, write_made_up

RIGHT = [True] * 30 + [False] * 10
BETTER = [True] * 36 + [False] * 4


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (2, 9), (10, 4)])
def test_mcnemar_s_p_value_is_that_of_all_ways_to_distribute_the_discordant_examples(first, second):
    count = first + second
    sides = (sum(bits) for bits in itertools.product((0, 1), repeat=count))
    distance = abs(first - count / 2)
    extreme = sum(abs(side - count / 2) >= distance for side in sides)
    assert mcnemar_exact(first, second) == pytest.approx(extreme / 2**count)


def test_mcnemar_agrees_with_exact_integers_for_thousands_of_examples():
    exact = 2 * sum(math.comb(2611, hits) for hits in range(1213)) / 2**2611
    assert mcnemar_exact(1212, 1399) == pytest.approx(exact, rel=1e-9)


def test_mcnemar_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for first, second in ((0, 5), (17, 30), (100, 101)):
        wanted = stats.binomtest(first, first + second).pvalue
        assert mcnemar_exact(first, second) == pytest.approx(wanted)


def test_benjamini_hochberg_of_the_example_in_the_paper():
    # Benjamini and Hochberg (1995), section 3.2: 15 p-values, four of which are rejected at 0.05
    p_values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262]
    p_values += [0.5719, 0.6528, 0.7590, 1.0]
    q_values = benjamini_hochberg(p_values)
    assert sum(q <= 0.05 for q in q_values) == 4
    assert q_values[:4] == pytest.approx([0.0015, 0.003, 0.0095, 0.035625])
    assert q_values[4] == pytest.approx(min(0.0201 * 15 / 5, 0.0278 * 15 / 6, 0.0298 * 15 / 7))
    order = random.Random(0).sample(range(15), 15)
    assert benjamini_hochberg([p_values[index] for index in order]) == [q_values[index] for index in order]
    assert benjamini_hochberg([]) == []


def test_the_bootstrap_draws_every_combination_of_examples_equally_often():
    values = np.array([[0.0], [1.0], [5.0]])
    draws = bootstrap_ratios(values, np.ones((3, 1)), resamples=60_000, seed=1)[:, 0]
    wanted = [sum(combination) / 3 for combination in itertools.product((0, 1, 5), repeat=3)]
    for mean in set(wanted):
        assert np.isclose(draws, mean).mean() == pytest.approx(wanted.count(mean) / 27, abs=0.006)


def test_the_bootstrap_resamples_numerators_with_their_weights_and_in_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    weights = rng.uniform(1, 9, (50, 2))
    constant = weights * [2.0, 3.0]
    whole = bootstrap_ratios(constant, weights, resamples=500, seed=3)
    assert np.allclose(whole, [2.0, 3.0])
    nats = rng.uniform(0, 9, (50, 2))
    draws = bootstrap_ratios(nats, weights, resamples=500, seed=3)
    monkeypatch.setattr("mega_eval.paired_statistics._CHUNK", 333)
    assert np.allclose(bootstrap_ratios(nats, weights, resamples=500, seed=3), draws)


def test_a_bootstrap_p_value_is_the_level_at_which_the_interval_excludes_0():
    draws = np.arange(-5.0, 995.0)
    assert bootstrap_p_value(draws) == pytest.approx(2 * 7 / 1001)
    assert bootstrap_p_value(np.zeros(99)) == 1
    assert bootstrap_p_value(np.ones(99)) == pytest.approx(0.02)
    assert percentile_interval(np.arange(1001.0)) == (25, 975)


@pytest.mark.long
def test_the_interval_of_a_difference_of_perplexities_contains_the_truth_95_times_of_100():
    rng = np.random.default_rng(5)
    hits, trials = 0, 600
    for trial in range(trials):
        weights = rng.integers(1, 30, 200).astype(float)
        difficulty = rng.normal(3, 1, 200)
        losses = difficulty[:, None] + rng.normal([0, -0.1], 0.4, (200, 2))
        both = np.stack([weights, weights], axis=1)
        draws = np.exp(bootstrap_ratios(losses * both, both, resamples=1000, seed=trial))
        low, high = percentile_interval(draws[:, 1] / draws[:, 0])
        hits += low < math.exp(-0.1) < high
    # four standard deviations of 600 trials below and above 95 %
    assert 0.914 < hits / trials < 0.986


@pytest.fixture
def pair(tmp_path):
    """Two results on 40 examples; the second answers six more correctly and has lower losses."""
    losses = [1 + index % 7 / 3 for index in range(40)]
    weights = [1.0 + index % 3 for index in range(40)]
    first = make_examples(RIGHT, losses, weights)
    second = make_examples(BETTER, [loss * 0.9 for loss in losses], weights)
    return (
        write_made_up(tmp_path / "a.json", first, model="a"),
        write_made_up(tmp_path / "b.json", second[::-1], model="b"),
    )


def test_every_metric_is_compared_by_the_scores_it_is_made_from(pair):
    comparisons, notes = compare_results(pair, resamples=2000)
    accuracy, loss, perplexity = comparisons
    assert notes == []
    assert (accuracy.metric, accuracy.test, accuracy.discordant) == ("accuracy", "mcnemar", (0, 6))
    assert accuracy.p_value == pytest.approx(2 / 2**6)
    assert accuracy.difference == pytest.approx(6 / 40)
    for comparison in comparisons:
        values = [result.metrics[comparison.metric].value for result in pair]
        assert comparison.values == pytest.approx(values)
        assert comparison.interval[0] <= comparison.difference <= comparison.interval[1]
    assert (loss.test, loss.difference) == ("bootstrap", pytest.approx(-0.1 * loss.values[0]))
    assert perplexity.values[1] == pytest.approx(math.exp(loss.values[1]))
    assert [comparison.verdict(0.05) for comparison in comparisons] == ["better"] * 3
    p_values = [comparison.p_value for comparison in comparisons]
    assert [comparison.q_value for comparison in comparisons] == benjamini_hochberg(p_values)


def test_a_result_compared_with_itself_does_not_differ(pair, tmp_path):
    copy = write_made_up(tmp_path / "c.json", pair[0].examples, model="c")
    for comparison in compare_results([pair[0], copy], resamples=500)[0]:
        assert (comparison.difference, comparison.p_value, comparison.interval) == (0, 1, (0, 0))
        assert comparison.verdict(0.05) == ""


def test_paired_examples_show_a_difference_that_the_separate_intervals_hide(pair):
    loss = compare_results(pair, resamples=2000)[0][1]
    assert loss.q_value < 0.01
    separate = [result.metrics["loss"] for result in pair]
    assert separate[0].interval[0] < separate[1].interval[1]
    assert abs(loss.difference) < separate[0].detectable


def test_more_results_are_each_compared_with_the_first_or_all(pair, tmp_path):
    third = write_made_up(tmp_path / "c.json", pair[0].examples, model="c")
    names = [(c.first[0], c.second[0]) for c in compare_results([*pair, third], resamples=100)[0]]
    assert list(dict.fromkeys(names)) == [("a", "b"), ("a", "c")]
    names = [
        (c.first[0], c.second[0]) for c in compare_results([*pair, third], pairs="all", resamples=100)[0]
    ]
    assert list(dict.fromkeys(names)) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_several_tasks_are_compared_together_and_adjusted_over_all(pair, tmp_path):
    others = [
        write_made_up(tmp_path / f"{model}-boolq.json", make_examples(right), task="boolq", model=model)
        for model, right in (("a", RIGHT), ("b", BETTER))
    ]
    comparisons = compare_results([pair[0], others[0], pair[1], others[1]], resamples=500)[0]
    assert {c.task for c in comparisons} == {"lambada", "boolq"}
    assert len(comparisons) == 6
    alone = compare_results(others, resamples=500)[0]
    assert comparisons[3].p_value == alone[0].p_value
    assert comparisons[3].q_value != alone[0].q_value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "boolq"}, r"b\.json: task: differs: found boolq, wanted lambada, that of .*a\.json"),
        ({"convention": "openai"}, r"b\.json: convention: differs: found openai, wanted strict"),
        ({"data": "e"}, r"b\.json: sha256 of the data: differs: found 65000.*, wanted 64000"),
    ],
)
def test_results_that_cannot_be_paired_are_refused_and_the_difference_is_named(tmp_path, changes, message):
    first = write_made_up(tmp_path / "a.json", make_examples(RIGHT))
    second = write_made_up(tmp_path / "b.json", make_examples(RIGHT), model="b", **changes)
    with pytest.raises(FormatError, match=message):
        compare_results([first, second])


def test_other_examples_and_other_answers_are_refused(pair, tmp_path):
    fewer = write_made_up(tmp_path / "c.json", pair[0].examples[:-1])
    for results in ([pair[0], fewer], [fewer, pair[0]]):
        with pytest.raises(FormatError, match=r"c\.json: examples: differ: found 39 examples without 39"):
            compare_results(results)
    altered = [replace(example, expected="xyz") for example in pair[0].examples]
    changed = write_made_up(tmp_path / "d.json", altered)
    with pytest.raises(
        FormatError, match=r"d\.json: expected answer of 0: differs: found 'xyz', wanted 'word0'"
    ):
        compare_results([pair[0], changed])
    with pytest.raises(FormatError, match=r"a\.json: nothing to compare it with"):
        compare_results(pair[:1])


def test_equal_files_of_different_names_are_paired_by_their_lines(tmp_path):
    results = []
    for name, right in (("a", RIGHT), ("b.longer", BETTER)):
        examples = [replace(e, id=f"{name}.jsonl:{e.id}") for e in make_examples(right)]
        results.append(write_made_up(tmp_path / f"{name}.json", examples, model=name))
    assert compare_results(results, resamples=100)[0][0].discordant == (0, 6)


def test_a_reader_is_told_of_other_differences_and_of_metrics_that_were_left_out(tmp_path):
    average = replace(metrics.mean([1.0, 0.0], "average over subjects"), example_score=None)
    results = [
        write_made_up(
            tmp_path / f"{name}.json",
            make_examples(RIGHT),
            model=name,
            options={"few_shot": shots},
            is_whole=name == "a",
            extra={"average": average},
        )
        for name, shots in (("a", 0), ("b", 5))
    ]
    notes = compare_results(results, resamples=100)[1]
    assert notes == [
        f"option few_shot differs: 0 in {tmp_path / 'a.json'}, 5 in {tmp_path / 'b.json'}",
        f"{tmp_path / 'b.json'} is not publishable: examples were left out",
        "lambada average: left out, because its examples cannot be paired",
    ]


def test_a_result_that_is_given_twice_is_refused_and_equal_models_are_noted(pair, tmp_path):
    with pytest.raises(ConfigError, match=r"a\.json: is given twice: wanted results of different models"):
        compare_results([pair[0], pair[1], read_result(tmp_path / "." / "a.json")])
    copy = write_made_up(tmp_path / "again.json", pair[0].examples, model="a")
    assert compare_results([pair[0], copy], resamples=100)[1] == [
        f"one model: {tmp_path / 'a.json'} and {tmp_path / 'again.json'} have the same weights"
    ]


def test_metrics_of_some_of_the_examples_are_compared_on_these(tmp_path):
    results = []
    for name, right in (("a", RIGHT), ("b", BETTER)):
        examples = make_examples(right)
        for example in examples[20:]:
            example.scores["late"] = example.scores["correct"]
        late = metrics.proportion(right[20:], "late examples", example_score="late")
        extra = {"late": late, **{f"subject_{n}": replace(late, example_score=None) for n in range(5)}}
        results.append(write_made_up(tmp_path / f"{name}.json", examples, model=name, extra=extra))
    comparisons, notes = compare_results(results, resamples=2000)
    late = comparisons[-1]
    assert (late.metric, late.test, late.count) == ("late", "mcnemar", 20)
    assert (late.discordant, late.values) == ((0, 6), (0.5, 0.8))
    assert late.interval[0] == pytest.approx(0.1, abs=0.051)
    lines = list(format_comparisons(comparisons, 0.05))
    assert lines[0].endswith(", 40 examples")
    assert lines[-2].endswith("20 examples, right only in first 0, in second 6")
    assert lines[2].endswith("   right only in first 0, in second 6")
    assert notes == [
        "lambada: 5 metrics left out, because no scores of examples pair them: "
        "subject_0, subject_1, subject_2, ..."
    ]


@pytest.mark.parametrize(
    ("option", "name", "suffix"), [("--output", "c", ".json"), ("--plot", "c.jpg", ".png")]
)
def test_outputs_of_other_names_are_refused_before_the_work(pair, tmp_path, option, name, suffix):
    words = ["compare", *(str(result.path) for result in pair), option, str(tmp_path / name)]
    error = CliRunner().invoke(cli, words).exception
    assert str(error) == (
        f"{option}: its name does not end in {suffix}: found {tmp_path / name}; "
        f"hint: {option} {tmp_path / name}{suffix}"
    )
    assert not (tmp_path / name).exists()


def test_the_command_prints_a_table_and_writes_json_and_a_chart(pair, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    outputs = ["--output", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png")]
    words = ["compare", *(str(result.path) for result in pair), *outputs, "--resamples", "500"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False).output.splitlines()
    assert shown[0] == "lambada strict: b/iter_0000010 against a/iter_0000010, 40 examples"
    assert shown[2].split()[:4] == ["accuracy", "0.7500", "0.9000", "+0.1500"]
    assert shown[2].endswith("better  right only in first 0, in second 6")
    assert shown[-2:] == [f"written to {tmp_path / 'c.json'}", f"written to {tmp_path / 'c.png'}"]
    record = json.loads((tmp_path / "c.json").read_bytes())
    assert record["comparisons"][0]["discordant"] == [0, 6]
    assert record["results"][1]["model"] == "/runs/b/iter_0000010"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(cli, [*words, "--overwrite"], catch_exceptions=False).exit_code == 0
    for option, name in (("--output", "c.json"), ("--plot", "c.png")):
        with pytest.raises(ConfigError, match=rf"{option}: a file of this name exists: found .*{name}; hint"):
            CliRunner().invoke(cli, [*words[:3], option, str(tmp_path / name)], catch_exceptions=False)


def test_huge_numbers_do_not_widen_the_tables(tmp_path):
    results = [
        write_made_up(tmp_path / f"{name}.json", make_examples([True, False], [nats, nats + 1]), model=name)
        for name, nats in (("a", 600.0), ("b", 650.0))
    ]
    tables = [
        format_comparisons(compare_results(results, resamples=100)[0], 0.05),
        format_sweep(
            [
                SweepPoint(
                    iteration=number,
                    tokens=None,
                    checkpoint_sha256="",
                    result="",
                    metrics={
                        name: MetricPoint(metric.value, None, None) for name, metric in result.metrics.items()
                    },
                )
                for number, result in enumerate(results)
            ],
            {
                name: MetricSpread(mean=metric.value, stdev=metric.value / 3, checkpoints=2)
                for name, metric in results[1].metrics.items()
            },
        ),
    ]
    for table in map(list, tables):
        assert re.search(r" \d\.\d{4}e\+2\d\d ", "\n".join(table) + " ")
        assert max(map(len, table)) < 140


def test_a_chart_without_matplotlib_is_refused_before_the_work(pair, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["compare", *(str(result.path) for result in pair), "--plot", "c.png"]
    error = CliRunner().invoke(cli, words).exception
    assert str(error).startswith("--plot: needs matplotlib; hint: pip install")
