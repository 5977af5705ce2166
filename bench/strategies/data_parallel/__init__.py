"""Replicas of one model that apply equal updates, and the two ways in which DDP exchanges gradients for them."""
