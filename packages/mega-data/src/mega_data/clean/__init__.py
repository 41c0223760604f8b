"""Clean text step by step: each step changes a document or drops it with a reason."""
