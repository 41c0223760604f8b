"""The commands of `mega-data`, one file each; heavy imports happen inside their functions."""
