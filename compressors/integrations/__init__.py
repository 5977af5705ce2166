"""Compressed gradients in trainers that wrap the model in DistributedDataParallel themselves.

`compressors.integrations.lightning`, `.accelerate` and `.transformers` each need the package of that name:
`pip install 'gradwire[lightning]'`, `'gradwire[accelerate]'` or `'gradwire[transformers]'`.
"""
