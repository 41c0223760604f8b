"""Telemetry of a run: events, and observers that receive them."""
