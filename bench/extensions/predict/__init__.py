"""`bench calibrate` and `bench predict`: predict a training step on other links and with other numbers of ranks."""
