"""What several collectives share."""
