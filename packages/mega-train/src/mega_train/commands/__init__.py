"""The subcommands of mega-train that do not train."""
