"""Run `mega-train` as `python -m mega_train`."""

from mega_train.cli import main

main()
