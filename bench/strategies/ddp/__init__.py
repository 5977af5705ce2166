"""The strategy `ddp`: gradients are summed in every step."""
