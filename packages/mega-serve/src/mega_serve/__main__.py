"""Run `mega-serve` as `python -m mega_serve`."""

from mega_serve.cli import main

main()
