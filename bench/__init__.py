"""bench: does compressing gradients make training finish sooner, on this link, without losing accuracy?"""
