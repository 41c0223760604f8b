"""Extract text from web archives and Wikipedia: one module per format, each a stream of pages."""
