"""Devices: what operations and transfers of a placed model take, and when each ends."""
