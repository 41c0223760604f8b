"""Reports about a run: an HTML page and a loss plot."""
