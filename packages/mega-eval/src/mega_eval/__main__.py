"""`python -m mega_eval` is `mega-eval`."""

from mega_eval.cli import main

main()
