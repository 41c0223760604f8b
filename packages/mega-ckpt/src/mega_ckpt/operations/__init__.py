"""The work behind each command: convert, reshard, average, diff, inspect, prune."""
