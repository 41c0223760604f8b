"""Run `mega-eval` as `python -m mega_eval`."""

from mega_eval.cli import main

main()
