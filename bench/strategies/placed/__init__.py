"""The strategy `placed`: a host process and device processes, which exchange tensors through shared memory."""
