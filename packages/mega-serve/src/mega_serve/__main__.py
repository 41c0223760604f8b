"""`python -m mega_serve` is `mega-serve`."""

from mega_serve.cli import main

main()
