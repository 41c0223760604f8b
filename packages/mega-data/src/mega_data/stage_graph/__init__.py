"""Run the commands of a pipeline file in the order of their inputs, each again only if something changed."""
