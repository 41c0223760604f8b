"""The commands: each opens what its flags name, calls one function and prints the outcome."""
