"""The commands: parse options, call one operation, print its result."""
