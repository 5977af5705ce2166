"""Exchange tensors through a compressor and a collective, with the state that a rank keeps for it."""
