"""Inputs of a corpus, whatever their form, as blocks that a worker process turns into rows of texts.

inputs.py   names, globs and folders -> files, each with its form
blocks.py   a block of lines, of plain text, of a table -> rows; and what is wrong with a row
packed.py   compressed files -> their bytes
streams.py  a file -> its blocks, from any position, so that a stopped run goes on
tables.py   Parquet and Hugging Face datasets -> blocks
hub.py      datasets by their name
"""
