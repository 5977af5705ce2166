"""Output of the commands: plans, progress, tables and JSON, in one module per command."""
