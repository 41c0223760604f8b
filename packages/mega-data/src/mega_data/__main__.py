"""Run `mega-data` as `python -m mega_data`."""

from mega_data.cli import main

main()
