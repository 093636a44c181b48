"""The te-thd-bridge command; one module a subcommand."""
