"""Compressors: gradient -> payload. Import a method from its file: `from compressors.group_topk import GroupTopK`."""
