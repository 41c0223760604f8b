"""Hugging Face model folders."""
