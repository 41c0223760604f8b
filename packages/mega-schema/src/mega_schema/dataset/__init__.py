"""Indexed datasets on disk: `.bin`, `.idx` and the information beside them."""
