"""Statistics of a corpus: lengths, domains, languages and token counts, as tasks in bounded memory."""
