"""Draw pictures of runs and predictions; matplotlib is imported only when a figure is drawn."""
