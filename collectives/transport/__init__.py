"""The one place where bytes leave a rank: messages between ranks, and who failed to answer."""
