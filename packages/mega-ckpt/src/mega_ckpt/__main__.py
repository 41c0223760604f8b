"""Run `mega-ckpt` as `python -m mega_ckpt`."""

from mega_ckpt.cli import main

main()
