"""Join inside training frameworks: one module for each, which imports it; this one imports nothing.

``joinables.integrations.accelerate``: a block for objects that Accelerate has prepared.
``joinables.integrations.transformers``: a ``Trainer`` of Transformers.
``joinables.integrations.lightning``: a strategy for Lightning's ``Trainer``.

``pip install 'joinables[NAME]'`` installs the framework of the same name.
"""
