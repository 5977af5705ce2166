"""The strategy `placed`: a host process and device processes around one pool of memory."""
