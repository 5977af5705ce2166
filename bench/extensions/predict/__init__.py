"""Prediction of a training step on other links and with other numbers of ranks: `bench calibrate`, `bench predict`."""
