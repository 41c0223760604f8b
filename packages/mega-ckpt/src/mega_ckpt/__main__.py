"""`python -m mega_ckpt` is `mega-ckpt`."""

from mega_ckpt.cli import main

main()
