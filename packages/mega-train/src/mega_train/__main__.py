"""`python -m mega_train` is `mega-train`."""

from mega_train.cli import main

main()
