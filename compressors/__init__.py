"""Gradient compressors. Import a method from its file: `from compressors.group_topk import GroupTopK`."""

import gradwire

gradwire.refuse_others(gradwire.LIBRARY)
