"""The command line: one file per command. Heavy imports happen inside commands, so help and completion stay fast."""
