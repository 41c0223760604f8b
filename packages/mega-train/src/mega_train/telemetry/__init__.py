"""Who sees a run: what happens to it as events, and observers that are told them."""
