"""Indexed datasets on disk: `.bin`, `.idx` and the metadata beside them."""
