"""A run as a page to look at, on paper as it was and beside another run."""
