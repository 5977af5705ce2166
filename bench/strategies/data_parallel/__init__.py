"""Replicas of one model that apply equal updates, and what becomes of their gradients: DDP sends them, or nobody."""
