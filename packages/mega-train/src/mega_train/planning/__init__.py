"""What a run would need and how fast it would be, from arithmetic alone: no GPU, no processes, no corpus.

`estimate` is a pure function of a `Job` (model, layout, batch, precision, recomputation, ZeRO stage) and a
`Hardware`; `search` is `estimate` over many jobs. `bench/plan.py` measures how well they do.
"""
