"""Train tokenizers from the counts of pre-tokenized words, which tasks count."""
