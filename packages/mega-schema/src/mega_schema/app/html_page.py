"""Layout of an HTML report: one self-contained file with its own style, light or dark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #fff; --rule: #d8dee4;
--grid: #eaeef2; --code: #f6f8fa } @media (prefers-color-scheme: dark) { :root { --text: #e6edf3;
--muted: #9198a1; --page: #0d1117; --rule: #3d444d; --grid: #262c36; --code: #151b23 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 62rem;
margin: 2rem auto; padding: 0 1rem } h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem;
border-top: 1px solid var(--rule); padding-top: 1rem } table { border-collapse: collapse; margin: .6rem 0 }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid var(--grid);
vertical-align: top } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: inline-block; height: .7em; background: #2f6f9f; min-width: 1px } .out { background: #9fb8c8 }
details { margin: .3rem 0 } pre { white-space: pre-wrap; background: var(--code); padding: .5rem .7rem;
margin: .3rem 0; font-size: 13px } figure { margin: .8rem 0 } figcaption { color: var(--muted);
font-size: 13px } svg { max-width: 100% }
"""


def render_page(title: str, body: str, style: str = "", head: str = "") -> str:
    """Return a whole HTML document.

    Args:
        title: text; also the heading.
        body: HTML.
        style: additional CSS.
        head: additional HTML in the head, before the style.
    """
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width">{head}<style>{_STYLE}{style}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def render_table(head: Sequence[str], rows: Sequence[str], numbers: Collection[str] = ()) -> str:
    """Return an HTML table with a text header.

    Args:
        numbers: names of the numeric columns, aligned to the right.
    """
    cells = "".join(f"<th{' class=n' if name in numbers else ''}>{escape(name)}</th>" for name in head)
    return f"<table><tr>{cells}</tr>{''.join(rows)}</table>"
