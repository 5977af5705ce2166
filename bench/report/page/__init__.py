"""The HTML report: what it says, and the template that it is said with."""
