"""`python -m mega_data` is `mega-data`."""

from mega_data.cli import main

main()
