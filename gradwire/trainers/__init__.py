"""Compressed gradients in trainers that wrap the model in DistributedDataParallel themselves.

`gradwire.trainers.lightning`, `.accelerate` and `.transformers` each need the package of the same name:
`pip install 'gradwire[lightning]'`, `'gradwire[accelerate]'` or `'gradwire[transformers]'`.
"""

from gradwire.hidden_packages import refuse_others

refuse_others()
