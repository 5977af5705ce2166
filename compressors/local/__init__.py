"""Local steps: every rank trains alone for some steps, then ranks exchange how far they moved; see `attach_local`."""

from compressors.local.attach import LocalHook, attach_local

__all__ = ["LocalHook", "attach_local"]
