"""The configuration of each command: one frozen dataclass per command, sent as JSON to every process that it starts."""
