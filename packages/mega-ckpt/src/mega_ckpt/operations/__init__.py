"""The operations of the commands: convert, reshard, average, diff, inspect, prune."""
