"""`mega-data train-ngram`: train an n-gram model on text, for the step `perplexity` of `clean`."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.clean.ngram_options import MAX_ORDER, NgramOptions
from mega_data.clean.ngram_sentences import NORMALIZATIONS
from mega_data.commands.common import RepeatableOptionCommand, adapter_option, open_adapter
from mega_data.commands.preprocess import INPUT_HELP
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.errors import ConfigError


@click.command("train-ngram", cls=RepeatableOptionCommand)
@click.option("--input", "words", multiple=True, required=True, help=INPUT_HELP)
@click.option("--output", type=OUTPUT_FILE, required=True, help="File for the model; .gz compresses it.")
@click.option("--order", type=click.IntRange(1, MAX_ORDER), default=5, help="Words of the longest n-grams.")
@click.option(
    "--prune",
    type=click.IntRange(min=0),
    multiple=True,
    default=(0,),
    help="Per order, leave out n-grams of at most this count; the last value is also that of higher orders.",
)
@click.option("--tokenizer", default="", help="SentencePiece model that splits lines; default: white space.")
@click.option(
    "--normalize", type=click.Choice(NORMALIZATIONS), help="Convert texts first, as CCNet does, to one line."
)
@click.option("--discount-fallback", is_flag=True, help="Fixed discounts where a small text has none.")
@click.option("--json-key", default="text", help="Key of the text; meta.text: text in the object meta.")
@click.option("--max-documents", type=click.IntRange(min=1), help="Documents to train on.  [default: all]")
@adapter_option
@click.option("--memory", type=click.IntRange(min=1), default=4096, help="MiB for the n-grams.")
def train_ngram(
    words: tuple[str, ...],
    output: Path,
    order: int,
    prune: tuple[int, ...],
    tokenizer: str,
    normalize: str | None,
    discount_fallback: bool,
    json_key: str,
    max_documents: int | None,
    adapter: str | None,
    memory: int,
) -> None:
    """Train an n-gram model with modified Kneser-Ney smoothing, as KenLM's lmplz, in ARPA format.

    A line of a text is a sentence. The step perplexity of `clean` scores texts by the model; give it the same
    tokenizer and normalize.
    """
    from mega_data.clean.ngram_model import is_arpa
    from mega_data.clean.ngram_sentences import open_splitter
    from mega_data.clean.ngram_training import train_ngram as train
    from mega_data.interruptible import run_interruptible
    from mega_data.readers.inputs import expand_inputs
    from mega_data.texts import read_texts
    from mega_schema.outputs import check_output

    if output.suffix in (".zst", ".parquet"):
        name = output.with_suffix(".gz")
        raise ConfigError("--output", "not plain or .gz", found=output, hint=f"--output {name}")
    options = NgramOptions(order, prune, discount_fallback, memory << 20)
    options.check()
    split = open_splitter(tokenizer, normalize or "", "--")
    inputs = expand_inputs(words, adapter=open_adapter(adapter))
    files = [item.path for item in inputs if not item.is_stdin]
    check_output("--output", output, "file", inputs=files, is_ours=is_arpa)
    # a final line break ends a line and begins none
    sentences = (
        sentence
        for text in read_texts(inputs, json_key, max_documents)
        for sentence in split(text.removesuffix("\n"))
    )
    report = run_interruptible(lambda: train(sentences, options, output))
    counts = ", ".join(f"{count:,} {size}-grams" for size, count in enumerate(report.ngrams, 1))
    click.echo(f"{output}: {counts} of {report.words:,} words in {report.sentences:,} lines")
    if report.skipped:
        click.echo(f"note: {report.skipped:,} words <s>, </s> or <unk> of the text were skipped", err=True)
