"""Exchange tensors through a compressor and a collective, and keep the state that each rank needs for this."""
