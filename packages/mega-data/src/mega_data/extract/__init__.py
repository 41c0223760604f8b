"""Text out of what the web and Wikipedia publish: one module per form, each a stream of pages."""
