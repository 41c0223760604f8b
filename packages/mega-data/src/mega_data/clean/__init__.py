"""Cleaning of text, step by step: each step mends a document or says why it goes."""
