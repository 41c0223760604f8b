"""Whether a constraint accepts a text."""

from __future__ import annotations

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.grammar import GrammarCompiler, GrammarError
from mega_serve.engine.requests import GrammarSpec


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Tell whether the text may begin an answer under the constraint."""
    state = compiler.compile(spec)
    try:
        for token in tokenizer.encode(text):
            state.accept(token)
    except GrammarError:
        return False
    return True
