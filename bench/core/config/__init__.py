"""What each command is asked for: one value per command, which crosses to every process that it starts."""
