"""The commands' configurations: one frozen dataclass per command, sent as JSON to the processes that it starts."""
