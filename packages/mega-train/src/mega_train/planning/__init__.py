"""Estimate the memory, communication and speed of a run analytically: no GPU, no processes, no data.

`estimate` is a pure function of a `Workload` (model, layout, batch, precision, recomputation, ZeRO stage) and
a `Hardware`; `search` is `estimate` over many workloads. `bench/plan.py` measures their accuracy.
"""
