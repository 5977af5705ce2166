"""Read results, compare configurations over seeds, and write tables, plots and the HTML report.

Importing these modules does not import torch.
"""
