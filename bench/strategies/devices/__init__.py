"""A host process that deals mini-batches and gives commands, and device processes that compute."""
