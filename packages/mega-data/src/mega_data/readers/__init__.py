"""Read the inputs of a corpus, in any format, as blocks that worker processes turn into rows of texts.

file_tree.py    words of --input (files, globs, folders) -> files
inputs.py       words of --input -> inputs, each with its format
magic.py        first bytes of a file -> its format and compression
compression.py  compressed file -> its text, as a stream or in pieces
bzip2.py        bz2 file -> the text of each block, from any offset
versions.py     detect that a file changed while it was read
blocks.py       block of lines, plain text or a table -> rows, and the errors in them
streams.py      input -> its blocks, from any position, so that a stopped run can resume
csv_table.py    CSV -> blocks
nested_keys.py  values in nested objects
arrow.py        Parquet and Hugging Face datasets -> blocks
hub.py          datasets by name
"""
