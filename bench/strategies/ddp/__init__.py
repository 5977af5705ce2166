"""The strategy `ddp`: all ranks sum their gradients in every step."""
