"""The commands' configurations: one frozen dataclass per command, sent as JSON to the processes of the command."""
