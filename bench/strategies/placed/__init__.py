"""The strategy `placed`: a host process and device processes that share one pool of memory."""
