"""Tasks by name: how a record becomes what the model reads."""
