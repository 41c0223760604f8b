"""The commands of mega-eval."""
