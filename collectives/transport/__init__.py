"""The one place where bytes leave a rank: messages between ranks, their schedules, and who failed to answer."""
